"""Where the numbers come from: every setting, every folder, every machine."""

from shortlist.program.report.charts import key
from shortlist.program.report.formats import ABSENT
from shortlist.program.report.gather import Comparison, Run
from shortlist.program.report.markup import Html, element
from shortlist.program.report.names import settings, shown, varied_settings
from shortlist.program.report.tables import plain_table, scrolling


def settings_table(comparison: Comparison) -> Html:
    """All settings of all set-ups, those that differ first and marked."""
    configs = [setup.config for setup in comparison.setups]
    varied = varied_settings(configs)
    flat = [settings(config) for config in configs]
    rows = [
        element(
            "tr",
            element("th", element("code", name), scope="row"),
            *(element("td", shown(values[name])) for values in flat),
            class_="varied" if name in varied else None,
        )
        for name in sorted(flat[0], key=lambda name: name not in varied)
    ]
    names = (element("th", key(setup.label, setup.style), scope="col") for setup in comparison.setups)
    head = element("tr", element("th", "setting", scope="col"), *names)
    return scrolling("Settings", element("table", element("thead", head), element("tbody", *rows)))


def origins_table(comparison: Comparison) -> Html:
    """Each run's folder, seed, machine and versions."""
    runs = [run for setup in comparison.setups for run in (*setup.finished, *setup.unfinished, *setup.copies)]
    copies = [run for setup in comparison.setups for run in setup.copies]
    columns = ("folder", "seed", "state", "started", "device", "torch", "commit")
    rows = ((str(run.folder.path), [str(run.config.seed), _state(run, copies), *_origin(run)]) for run in runs)
    return plain_table("Folders and machines", columns, rows)


def _state(run: Run, copies: list[Run]) -> str:
    return ("unfinished" if run.final is None else "finished") + (", left out" if run in copies else "")


def _origin(run: Run) -> list[str]:
    found = run.environment
    commits = run.folder.commits() if found else []
    versions = found.get("versions", {})
    started = str(found.get("started", ABSENT)).replace("T", " ")
    device = str(found.get("device", ABSENT))
    if found.get("world_size", 1) > 1:
        device = f"{device}, {found['world_size']} processes"
    return [started, device, versions.get("torch", ABSENT), ", ".join(commits) or ABSENT]
