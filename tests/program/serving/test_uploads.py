"""Whatever is uploaded gets an answer: a clear 4xx if it is no image, and the server stays up."""

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Iterator

import pytest
from PIL import Image
from starlette.testclient import TestClient

from tests.support.serving import form, indices, opened, photo

KINDS = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]


@pytest.fixture
def unharmed(client: TestClient) -> Iterator[TestClient]:
    """The server, which must give the same answer afterwards."""
    before = client.post("/api/suggest", files=form(photo(1)))
    yield client
    after = client.post("/api/suggest", files=form(photo(1)))
    assert after.status_code == 200
    assert indices(after.json()["suggestions"]) == indices(before.json()["suggestions"])


def assert_refused(client: TestClient, *contents: bytes, statuses: tuple[int, ...] = (422,)) -> None:
    response = client.post("/api/suggest", files=form(*contents))
    assert response.status_code in statuses, (response.status_code, contents[0][:40])
    sentence = response.json()["error"]
    assert "hoto" in sentence
    assert sentence.endswith(".")
    assert "Traceback" not in sentence


@pytest.mark.parametrize("kind", KINDS)
def test_cut_off_images_are_refused(unharmed: TestClient, kind: str) -> None:
    whole = photo(1, kind, size=(64, 48))
    for share in (0.0, 0.02, 0.1, 0.25, 0.5):
        assert_refused(unharmed, whole[: int(share * len(whole))])


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_images_are_answered_or_refused(unharmed: TestClient, kind: str) -> None:
    drawn = random.Random(7)
    whole = photo(1, kind, size=(64, 48))
    for _ in range(15):
        content = bytearray(whole)
        for _ in range(drawn.randint(1, 20)):
            content[drawn.randrange(len(content))] = drawn.randrange(256)
        response = unharmed.post("/api/suggest", files=form(bytes(content)))
        assert response.status_code in (200, 413, 422)
        assert response.status_code == 200 or response.json()["error"]


def test_files_that_are_no_images_are_refused(unharmed: TestClient) -> None:
    drawn = random.Random(3)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("photo.png", photo())
    contents = [
        b"",
        b"\x00",
        b"a text\n" * 100,
        b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
        b"<html></html>",
        b"%PDF-1.7\n%%EOF",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",  # Pillow would start Ghostscript for it
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff\xe0",
        b"GIF89a",
        b"RIFF\xff\xff\xff\xffWEBPVP8 ",
        b"\x00\x00\x00\x18ftypheic" + bytes(100),
        archive.getvalue(),
        *(drawn.randbytes(drawn.randint(1, 3000)) for _ in range(40)),
        *(photo()[:8] + drawn.randbytes(200) for _ in range(20)),
    ]
    for content in contents:
        assert_refused(unharmed, content)


@pytest.mark.parametrize("kind", ["ICO", "PPM", "TGA", "PCX", "EPS", "PDF"])
def test_formats_that_are_no_photos_are_refused(unharmed: TestClient, kind: str) -> None:
    assert_refused(unharmed, photo(kind=kind))


def png_that_claims(width: int, height: int) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(8000, 8000), (60_000, 60_000), (2**31 - 1, 1), (2**31 - 1, 2**31 - 1)])
def test_decompression_bombs_are_refused(unharmed: TestClient, width: int, height: int) -> None:
    assert_refused(unharmed, png_that_claims(width, height), statuses=(413, 422))


def test_the_photo_that_is_wrong_is_named(unharmed: TestClient) -> None:
    response = unharmed.post("/api/suggest", files=form(photo(), b"nothing", photo()))
    assert response.status_code == 422
    assert "Photo 2" in response.json()["error"]


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("multipart/form-data", b"", 400),
        ("multipart/form-data; boundary=", b"--\r\n", 400),
        ("multipart/form-data; boundary=x", b"", 400),
        ("multipart/form-data; boundary=x", b"nothing of this kind", 400),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\n\r\n--x--\r\n", 400),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\ncontent-disposition: form-data; name="photos"\r\n\r\na\r\n--x--',
            400,
        ),
        ("multipart/form-data; boundary=x", b"--x\r\n" + b"a" * 100_000 + b": b\r\n\r\n", 400),
        ("multipart/form-data; boundary=x; charset=nonsense", b"--x\r\n\xff: \xff\r\n\r\n", 400),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\ncontent-disposition: form-data; name="\xff\xfe"; filename="\xff"\r\n\r\na\r\n--x--\r\n',
            400,
        ),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\n' + bytes(99_999),
            400,
        ),
        ("application/json", b"{}", 415),
        ("image/png", photo(), 415),
        ("", b"", 415),
    ],
)
def test_malformed_forms_are_refused(unharmed: TestClient, kind: str, body: bytes, status: int) -> None:
    response = unharmed.post("/api/suggest", content=body, headers={"content-type": kind})
    assert response.status_code == status, response.text
    assert response.json()["error"]


def test_a_length_that_is_no_number_is_refused(unharmed: TestClient) -> None:
    for length in ("-1", "many", "1e3", "²"):
        headers = {"content-type": "multipart/form-data; boundary=x", "content-length": length.encode()}
        assert unharmed.post("/api/suggest", content=b"", headers=headers).status_code == 400  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_images_of_any_mode_are_answered(unharmed: TestClient, mode: str) -> None:
    content = io.BytesIO()
    Image.new("I;16" if mode == "I;16" else mode, (30, 20)).save(content, "TIFF" if mode in ("CMYK", "LA") else "PNG")
    assert unharmed.post("/api/suggest", files=form(content.getvalue())).status_code == 200


def test_a_photo_is_turned_upright_as_the_predictor_does(unharmed: TestClient) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = photo(1, "JPEG", exif=exif, quality=95)
    upright = opened(photo(1, "JPEG", quality=95)).transpose(Image.Transpose.ROTATE_270)
    content = io.BytesIO()
    upright.save(content, "PNG")
    one, other = (unharmed.post("/api/suggest", files=form(each)).json() for each in (turned, content.getvalue()))
    scores = [[item["score"] for item in answer["suggestions"]] for answer in (one, other)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-3, abs=1e-3)
