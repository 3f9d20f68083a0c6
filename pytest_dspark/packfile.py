"""A pack as somebody hands it over: a folder, or an archive that is unpacked beside it. Nothing in it is trusted.

Refused: names that lead out of the folder, links, files that are no files, names that differ in case alone, files that no
pack has, and archives that grow beyond reason. Standard library alone.
"""

from __future__ import annotations

import lzma
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Final

from pytest_dspark.errors import ConfigError
from pytest_dspark.pack import LAYOUT, STATEMENT, files_of

MOST_BYTES: Final = 16 << 30
MOST_FILES: Final = 20_000
DEEPEST: Final = 16
BROKEN: Final = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError)
"""What the libraries raise of an archive that is broken, encrypted or packed in a way that they do not know."""


@contextmanager
def opened(path: Path) -> Iterator[Path]:
    """The folder of a pack given as a folder, a run folder or an archive. Raises USAGE for what is none of these, and
    ValueError for an archive that must not be unpacked."""
    if (path / "run.lock").exists() and not (path / "publish").is_dir():
        raise ConfigError("USAGE", f"{path}: this run published nothing; its run.json says why")
    if path.is_dir():
        yield path / "publish" if (path / "publish").is_dir() and not (path / "PACK.md").exists() else path
        return
    if not path.is_file():
        raise ConfigError("USAGE", f"{path}: no such pack")
    with tempfile.TemporaryDirectory(prefix="dspark-pack-") as folder:
        unpack(path, Path(folder))
        yield _top(Path(folder))


def _top(folder: Path) -> Path:
    """The pack in an unpacked archive: at its top, or in its one folder."""
    inside = list(folder.iterdir())
    return inside[0] if len(inside) == 1 and inside[0].is_dir() else folder


def unpack(path: Path, folder: Path) -> None:
    """Unpack a tar or zip archive. Raises USAGE for another file, ValueError for a member that must not be."""
    try:
        if _is_tar(path):
            with tarfile.open(path) as archive:
                _all_of(_tar_members(archive), folder)
        elif _is_zip(path):
            with zipfile.ZipFile(path) as zipped:
                _all_of(_zip_members(zipped), folder)
        else:
            raise ConfigError("USAGE", f"{path}: neither a folder nor a tar or zip archive")
    except BROKEN as error:
        raise ValueError(f"{path.name}: {error}") from error


def _is_tar(path: Path) -> bool:
    with path.open("rb") as file:
        return tarfile.is_tarfile(file)


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return zipfile.is_zipfile(file)


def _tar_members(archive: tarfile.TarFile) -> Iterator[tuple[str, int, IO[bytes] | None]]:
    for member in archive:
        if not (member.isfile() or member.isdir()) or member.issparse():
            raise ValueError(f"{member.name}: a link or no plain file")
        yield member.name, member.size, archive.extractfile(member) if member.isfile() else None


def _zip_members(archive: zipfile.ZipFile) -> Iterator[tuple[str, int, IO[bytes] | None]]:
    for member in archive.infolist():
        mode = member.external_attr >> 16
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise ValueError(f"{member.filename}: a link or no plain file")
        yield member.filename, member.file_size, None if member.is_dir() else archive.open(member)


def _all_of(members: Iterable[tuple[str, int, IO[bytes] | None]], folder: Path) -> None:
    names: set[str] = set()
    total = 0
    for number, (name, size, source) in enumerate(members, 1):
        total += size
        target = folder / _safe(name)
        if total > MOST_BYTES or number > MOST_FILES:
            raise ValueError(f"more than {MOST_FILES} files or {MOST_BYTES} bytes")
        if source is None:
            continue  # a folder comes with its files
        if name.casefold() in names:
            raise ValueError(f"{name}: twice in the archive")
        names.add(name.casefold())
        target.parent.mkdir(parents=True, exist_ok=True)
        with source, target.open("xb") as file:
            shutil.copyfileobj(_bounded(source, size), file)


def _bounded(source: IO[bytes], size: int) -> IO[bytes]:
    """The archive says how long a member is; one that is longer is cut, and its checksum will not hold."""

    class Bounded:
        left = size

        def read(self, count: int = -1) -> bytes:
            data = source.read(min(self.left, count if count >= 0 else self.left))
            self.left -= len(data)
            return data

    return Bounded()  # type: ignore[return-value]


def _safe(name: str) -> PurePosixPath:
    """Raises ValueError for a name that leads out of the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or not path.parts:
        raise ValueError(f"{name!r}: leads out of the pack")
    if len(path.parts) > DEEPEST:
        raise ValueError(f"{name[:60]!r}…: more than {DEEPEST} folders deep")
    return path


def strange(path: Path) -> Iterator[tuple[str, str]]:
    """(file, why) of everything in a pack's folder that no pack has."""
    names, seen = files_of(path), set()
    for name in names:
        one = path / name
        if one.is_symlink() or not one.is_file():
            yield name, "is a link or no plain file"
        elif name.casefold() in seen:
            yield name, "differs in case alone from another file"
        elif not LAYOUT.fullmatch(name):
            yield name, "is no file of a pack"
        seen.add(name.casefold())
    for link in (one for one in path.rglob("*") if one.is_symlink() and one.is_dir()):
        yield link.relative_to(path).as_posix(), "is a link"
    if STATEMENT not in names and not names:
        yield ".", "is empty"
