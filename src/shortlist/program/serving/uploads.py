"""From the body of a request to images, in memory alone and within the limits."""

import asyncio
import contextlib
import io
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from PIL import Image, UnidentifiedImageError, features
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from shortlist.program.data.image_io import decoded_image
from shortlist.program.serving.limits import Limits, MemoryBudget, RefusedError, readable_bytes
from shortlist.program.text import counted

FIELD = "photos"
"""Name of the files in a form."""
# Fewer than Pillow knows: photos have these formats, and some of the others start programs or are rarely tested.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", *(["AVIF"] if "avif" in features.get_supported() else []))
_MOST_FIELDS = 16
_ROOM_FOR_TEXT = 2**16  # bytes of a form that are not in its files


class _InMemory(MultiPartParser):
    """Never writes to the disk: the length of the body is checked before."""

    spool_max_size = 2**62


@contextlib.asynccontextmanager
async def received_photos(
    request: Request, limits: Limits, budget: MemoryBudget
) -> AsyncIterator[tuple[list[bytes], dict[str, str]]]:
    """The files of a form and its other fields, for a block. Refuses whatever is too much or malformed."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise RefusedError(415, f"Send the photos as a form: multipart/form-data with files named {FIELD}.")
    with budget.reserve(_announced(request, limits)):
        try:
            async with asyncio.timeout(limits.seconds_to_send):
                parser = _InMemory(
                    request.headers,
                    _limited(request, limits),
                    max_files=limits.photos,
                    max_fields=_MOST_FIELDS,
                    max_part_size=_ROOM_FOR_TEXT,
                )
                form = await parser.parse()
        except RefusedError:
            raise
        except TimeoutError:
            raise RefusedError(408, f"The photos did not arrive within {limits.seconds_to_send:g} s.") from None
        except MultiPartException as error:
            raise _explained(error, limits) from None
        except ClientDisconnect:
            raise RefusedError(400, "The client left before everything had arrived.") from None
        except (UnicodeError, ValueError, LookupError):  # headers of parts that are no text
            raise RefusedError(400, "The form is malformed.") from None
        try:
            files = [item for item in form.getlist(FIELD) if isinstance(item, UploadFile)]
            fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
            contents = [await file.read() for file in files]
        finally:
            await form.close()
        if not contents:
            raise RefusedError(400, f"There is no photo: send at least one file named {FIELD}.")
        yield contents, fields


def decoded_photos(contents: Sequence[bytes], channels: int, limits: Limits) -> list[Image.Image]:
    """The photos upright, in grey or RGB, without anything else that was in their files."""

    def check_size(width: int, height: int) -> None:
        if width * height > limits.pixels_of_photo:
            raise RefusedError(
                413,
                f"{which} has {width * height / 1e6:,.0f} million pixels, and at most "
                f"{limits.pixels_of_photo / 1e6:g} million are taken: make it smaller.",
            )

    images = []
    for number, content in enumerate(contents, 1):
        which = "The photo" if len(contents) == 1 else f"Photo {number}"
        try:
            images.append(decoded_image(io.BytesIO(content), channels, _FORMATS, check_size))
        except RefusedError:
            raise
        except UnidentifiedImageError:
            raise RefusedError(
                422, f"{which} cannot be read: it is no JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF file. Convert it first."
            ) from None
        except Exception as error:  # decoders raise all kinds of errors on broken files
            raise RefusedError(422, f"{which} cannot be read: the file is damaged or cut off.") from error
    return images


def _announced(request: Request, limits: Limits) -> int:
    """How long the body is, or may be."""
    length = request.headers.get("content-length")
    if length is None:
        return limits.bytes_of_request
    if not length.isascii() or not length.isdigit():
        raise RefusedError(400, "The length of the request must be a number.")
    if int(length) > limits.bytes_of_request:
        raise _too_long(limits)
    return int(length)


async def _limited(request: Request, limits: Limits) -> AsyncGenerator[bytes, None]:
    """The body, as long as it keeps to the limit whatever it announced."""
    received = 0
    async for chunk in request.stream():
        received += len(chunk)
        if received > limits.bytes_of_request:
            raise _too_long(limits)
        yield chunk


def _too_long(limits: Limits) -> RefusedError:
    most = readable_bytes(limits.bytes_of_request)
    return RefusedError(413, f"The photos are too large: at most {most} in one request. Send fewer or smaller ones.")


def _explained(error: MultiPartException, limits: Limits) -> RefusedError:
    if error.message.startswith("Too many files"):
        return RefusedError(413, f"Too many photos: at most {counted(limits.photos, 'photo')} of one thing.")
    return RefusedError(400, "The form is malformed.")
