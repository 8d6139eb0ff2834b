// The page of `shortlist serve`. Whatever comes from the server is shown as text: class names may hold anything.

const COVERAGES = [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99];
const SLOW_AFTER = 4000; // milliseconds
// Not image/*: phones that keep HEIC photos convert them only for a page that does not take them.
const TYPES = "image/jpeg,image/png,image/webp,image/avif,image/gif,image/bmp,image/tiff";

const at = (id) => document.getElementById(id);
const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)}\u202f%`;
const counted = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

let about = null;
let photos = []; // {file, url} of one thing
let answer = null;
let asking = null; // AbortController of the request under way

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  Object.assign(made, properties);
  made.append(...children);
  return made;
}

// How sure: whole percents, since more digits would promise more than calibration can.
function certainty(suggestion) {
  const p = suggestion.probability;
  if (p === null) return suggestion.score === null ? "no score" : suggestion.score.toFixed(2);
  if (p < 0.005) return `<\u202f1\u202f%`;
  return p > 0.995 ? `>\u202f99\u202f%` : percent(p);
}

// Photos

function take(files, { adding = false } = {}) {
  const images = [...files].filter((file) => file.type.startsWith("image/") || file.type === "");
  if (images.length === 0) {
    if (files.length > 0) fail("This is not a photo. JPEG, PNG and WebP files are, for example.");
    return;
  }
  if (!adding) forget();
  const room = about.most_photos - photos.length;
  for (const file of images.slice(0, room)) photos.push({ file, url: URL.createObjectURL(file) });
  showPhotos();
  at("left-out").hidden = images.length <= room;
  ask();
}

function forget() {
  asking?.abort();
  for (const { url } of photos) URL.revokeObjectURL(url);
  photos = [];
  answer = null;
}

function drop(photo) {
  URL.revokeObjectURL(photo.url);
  photos = photos.filter((other) => other !== photo);
  if (photos.length === 0) {
    startOver();
  } else {
    showPhotos();
    at("strip").querySelector("button").focus();
    ask();
  }
}

function startOver() {
  forget();
  showPhotos();
  settle("");
  at("error").hidden = true;
  at("answer").hidden = at("title").hidden = true;
  at("choose").focus();
}

function showPhotos() {
  const shown = photos.map((photo, place) => {
    const name = photos.length === 1 ? "the photo" : `photo ${place + 1}`;
    const picture = element("img", { src: photo.url, alt: `Your ${name.replace("the ", "")}` });
    // Browsers cannot show all formats that the server reads.
    picture.addEventListener("error", () => picture.replaceWith(element("span", { className: "unshown" }, element("bdi", {}, photo.file.name))));
    const remove = element("button", { type: "button", textContent: "×" });
    remove.setAttribute("aria-label", `Remove ${name}`);
    remove.addEventListener("click", () => drop(photo));
    return element("li", {}, picture, remove);
  });
  at("strip").replaceChildren(...shown);
  at("main").dataset.state = photos.length ? "photos" : "empty";
  at("chosen").hidden = photos.length === 0;
  at("left-out").hidden = true;
  at("adding").hidden = about.most_photos === 1;
  at("add").disabled = photos.length >= about.most_photos;
  at("add-label").textContent = at("add").disabled ? `No more than ${photos.length} photos` : "Another photo of it";
}

// Asking

async function ask() {
  asking?.abort();
  const controller = (asking = new AbortController());
  const query = new URLSearchParams();
  for (const coverage of offeredCoverages()) query.append("coverage", coverage);
  if (at("prior").value) query.append("prior", at("prior").value);
  at("error").hidden = true;
  at("output").setAttribute("aria-busy", "true");
  say("Looking…");
  const slow = setTimeout(() => {
    say("Still waiting for the server. The connection may be slow.");
    at("waiting").hidden = false;
  }, SLOW_AFTER);
  try {
    answer = await send(`/api/suggest?${query}`, photoForm(), controller.signal);
    showAnswer();
  } catch (error) {
    if (controller !== asking) return; // a newer question took its place
    if (controller.signal.aborted) settle("Cancelled.");
    else fail(error.message, error.mayPass);
  } finally {
    clearTimeout(slow);
    if (controller === asking) at("waiting").hidden = true;
  }
}

function photoForm() {
  const form = new FormData();
  // Without its name, which may say where and when.
  photos.forEach(({ file }, place) => form.append("photos", file, `photo-${place + 1}`));
  return form;
}

async function send(address, body, signal) {
  const tooMany = body && photos.reduce((sum, { file }) => sum + file.size, 0) > about.most_bytes - 65536;
  if (tooMany) throw problem(`The photos are too large: at most ${Math.floor(about.most_bytes / 2 ** 20)} MB together.`, false);
  let response, content;
  try {
    response = await fetch(address, { method: body ? "POST" : "GET", body, signal });
    content = await response.json();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw problem("The server cannot be reached. Is it still running?", true);
  }
  const mayPass = response.status >= 500 || [408, 429].includes(response.status);
  if (!response.ok) throw problem(content.error, mayPass);
  return content;
}

// mayPass: the same request may succeed later.
function problem(sentence, mayPass) {
  return Object.assign(new Error(sentence), { mayPass });
}

function say(text, unseen = "") {
  const parts = [document.createTextNode(text)];
  if (unseen) parts.push(element("span", { className: "said", textContent: ` ${unseen}` }));
  at("status").replaceChildren(...parts);
}

function settle(text, unseen) {
  at("output").setAttribute("aria-busy", "false");
  say(text, unseen);
}

function fail(sentence, mayPass = false) {
  settle("");
  at("answer").hidden = at("title").hidden = true;
  at("error-text").textContent = sentence;
  at("retry").hidden = !mayPass || photos.length === 0;
  at("error").hidden = false;
}

// The answer

function showAnswer() {
  const { suggestions } = answer;
  at("suggestions").replaceChildren(...suggestions.map(suggestionItem));
  const shares = suggestions.map((suggestion) => suggestion.probability);
  at("order-note").hidden = !shares.some((share, place) => place > 0 && share > shares[place - 1] + 0.005);
  at("calibrate-note").hidden = about.is_calibrated;
  at("set").hidden = answer.sets.length === 0;
  if (answer.sets.length) showSet();
  at("none-part").hidden = !about.is_recording;
  at("none").disabled = false;
  at("none").textContent = "None of these";
  at("answer").hidden = at("title").hidden = false;
  const from = [answer.photos > 1 && `from ${answer.photos} photos together`, answer.prior && `for ${answer.prior}`];
  const best = suggestions[0];
  settle(from.filter(Boolean).join(", "), best ? `${counted(suggestions.length, "suggestion")}. The first is ${best.name}, ${certainty(best)}.` : "");
}

function suggestionItem(suggestion) {
  const item = element("li");
  if (suggestion.examples.length) {
    item.className = "pictured";
    const pictures = suggestion.examples.map((address) => element("img", { src: address, alt: "", loading: "lazy" }));
    item.append(element("div", { className: "pictures" }, ...pictures));
  }
  const name = element("bdi", { className: "name", textContent: suggestion.name });
  if (suggestion.name.length > 80) name.title = suggestion.name;
  item.append(name, element("span", { className: "certainty", textContent: certainty(suggestion) }));
  if (suggestion.probability !== null) {
    const filled = element("span");
    filled.style.width = `${100 * suggestion.probability}%`;
    const bar = element("div", { className: "bar" }, filled);
    bar.setAttribute("aria-hidden", "true"); // the percentage says the same
    item.append(bar);
  }
  return item;
}

function offeredCoverages() {
  const known = about.coverages;
  if (known.length <= COVERAGES.length) return known;
  return [...new Set([...COVERAGES, about.coverage])].filter((coverage) => known.includes(coverage)).sort((a, b) => a - b);
}

function showSet() {
  const found = answer.sets[Number(at("coverage").value)];
  const share = percent(found.coverage);
  at("coverage-value").textContent = share;
  at("coverage").setAttribute("aria-valuetext", `${share}: ${counted(found.size, "class", "classes")}`);
  const each = found.of === "classes" ? ", each class counting the same" : "";
  const worth = found.is_promised ? ` Of sets like this, ${share} contain the right class${each}.` : "";
  let text = `${counted(found.size, "class", "classes")}.${worth}`;
  if (found.size === 0) text = "No class is likely enough: perhaps it is something else.";
  if (found.size === about.classes) text = `All ${counted(found.size, "class", "classes")}: at ${share} nothing can be ruled out.`;
  at("set-text").textContent = text;
  const shown = found.size === about.classes ? [] : found.suggestions;
  at("set-names").replaceChildren(
    ...shown.map((suggestion) =>
      element("li", {}, element("bdi", { textContent: suggestion.name }), element("span", { className: "certainty", textContent: certainty(suggestion) })),
    ),
  );
  at("set-more").hidden = shown.length === 0 || shown.length === found.size;
  at("set-more").textContent = `And ${counted(found.size - shown.length, "more class", "more classes")}.`;
  at("promise-note").hidden = found.is_promised;
  const why = [answer.photos > 1 && "several photos", answer.prior && "a place or season"].filter(Boolean).join(" and ");
  at("promise-note").textContent = `With ${why}, the coverage is not promised: it was measured for single photos alone.`;
}

async function recordNone() {
  at("none").disabled = true;
  const form = photoForm();
  form.append("suggested", answer.suggestions.map((suggestion) => suggestion.index).join(","));
  try {
    await send("/api/none-of-these", form);
    at("none").textContent = "Recorded";
    say("Recorded, without place and time. Thank you.");
  } catch (error) {
    at("none").disabled = false;
    say(error.message);
  }
}

// The start

function listen() {
  for (const id of ["choose", "camera", "add"]) {
    at(id).accept = TYPES;
    at(id).addEventListener("change", () => {
      take(at(id).files, { adding: id === "add" });
      at(id).value = ""; // so that the same file can be chosen again
    });
  }
  at("again").addEventListener("click", startOver);
  at("cancel").addEventListener("click", () => asking?.abort());
  at("retry").addEventListener("click", ask);
  at("none").addEventListener("click", recordNone);
  at("coverage").addEventListener("input", showSet);
  at("prior").addEventListener("change", () => photos.length && ask());

  let depth = 0; // entering a child comes before leaving its parent
  const dragging = (change) => {
    depth = change === 0 ? 0 : depth + change;
    document.body.classList.toggle("dragging", depth > 0);
  };
  addEventListener("dragenter", () => dragging(1));
  addEventListener("dragleave", () => dragging(-1));
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    dragging(0);
    take(event.dataTransfer.files, { adding: at("chosen").contains(event.target) });
  });
  addEventListener("paste", (event) => take(event.clipboardData.files));
}

async function start() {
  try {
    about = await send("/api/about");
  } catch (error) {
    at("facts").textContent = "";
    fail(error.message);
    return;
  }
  at("photographing").hidden = navigator.maxTouchPoints === 0; // elsewhere it would choose a file, like the other one
  document.title = `shortlist: ${about.run}`;
  at("run").textContent = about.run;
  at("facts").textContent = `${counted(about.classes, "class", "classes")}, ${counted(about.suggested, "suggestion")} for a photo.`;
  at("calibrate").textContent = about.calibrate;
  if (about.most_photos === 1) {
    at("hint").textContent = "Drop a photo here, or paste one.";
    for (const id of ["choose", "add"]) at(id).multiple = false;
  }
  at("left-out").textContent = `At most ${counted(about.most_photos, "photo")} of one thing: the others were left out.`;
  at("version").textContent = about.version;
  at("privacy").textContent =
    `Photos are sent to ${location.host} and nowhere else. ` +
    (about.is_recording ? "It keeps a photo only if you press “None of these”." : "It keeps none of them.");
  if (about.priors.length) {
    const options = about.priors.map((name) => element("option", { value: name, textContent: name }));
    at("prior").replaceChildren(element("option", { value: "", textContent: "any" }), ...options);
    at("prior-setting").hidden = false;
  }
  const coverages = offeredCoverages();
  at("coverage").max = coverages.length - 1;
  at("coverage").value = Math.max(0, coverages.indexOf(about.coverage));
  at("coverage").hidden = coverages.length < 2; // an exported file has one
  listen();
  document.body.dataset.ready = "true";
}

start();
