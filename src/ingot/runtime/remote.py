"""Files in object storage (s3://, gs:// and other URLs for fsspec), and their staging folders below the cache folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ingot.errors import ConfigError, IngotError, Setting
from ingot.runtime.files import file_sha256, is_url, temporary_beside, user_path, writing
from ingot.runtime.locks import FolderLock
from ingot.runtime.machine import cache_root


def local_path(name: str) -> Path:
    """Return the path that a setting names; for a URL, the path of its staging folder."""
    url = name.rstrip("/")
    key = f"{url.rpartition('/')[2]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    return cache_root() / "remote" / key if is_url(name) else user_path(name)


@contextmanager
def staging(url: str, error: type[IngotError]) -> Iterator[Path]:
    """Yield the staging folder of a URL, created if needed and locked against other processes that download into it."""
    folder = local_path(url)
    locked = folder.with_name(f".{folder.name}.lock")
    with writing(folder, error, Setting("INGOT_CACHE")):
        for path in (locked, folder):
            path.mkdir(parents=True, exist_ok=True)
    with FolderLock(locked) as lock:
        lock.acquire(None)
        yield folder


class Remote:
    """The files below a URL, named relative to it. Failures are raised as `error`."""

    def __init__(self, url: str, error: type[IngotError]) -> None:
        from fsspec.core import url_to_fs  # slow to import, and few runs need it

        self.url, self._error = url.rstrip("/"), error
        try:
            self._fs, self._root = url_to_fs(self.url)
        except (ImportError, ValueError) as unsupported:  # the scheme needs another package, or is unknown
            raise ConfigError(f"{url}: {unsupported}", advice="for s3:// and gs://, pip install 'ingot-lm[remote]'") from None
        if hasattr(self._fs, "auto_mkdir"):  # create missing folders for file:// URLs
            self._fs.auto_mkdir = True

    def sizes(self) -> dict[str, int]:
        """Return the sizes in bytes of all files, or {} if there are none."""
        with self._reaching("list", ""):
            self._fs.invalidate_cache()
            files = self._fs.find(self._root, detail=True)
        # A name with .. would lead out of the staging folder.
        return {path[len(self._root) :].lstrip("/"): entry["size"] for path, entry in files.items() if "/../" not in path}

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        with self._reaching("read", name):
            return bytes(self._fs.cat_file(f"{self._root}/{name}"))

    def download(self, name: str, path: Path, sha256: str | None = None) -> None:
        """Download a file and verify its checksum, unless `path` has that checksum already."""
        if sha256 is not None and path.is_file() and file_sha256(path) == sha256:
            return
        temporary = temporary_beside(path)
        try:
            with self._reaching("read", name):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fs.get_file(f"{self._root}/{name}", str(temporary))
            if sha256 is not None and file_sha256(temporary) != sha256:
                raise self._error(f"{self.url}/{name} is damaged: its checksum does not match; restore or delete it")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def upload(self, path: Path, name: str) -> None:
        """Upload a file."""
        with self._reaching("write", name):
            self._fs.put_file(str(path), f"{self._root}/{name}")

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, in the given order."""
        for name in names:
            with self._reaching("delete", name):
                self._fs.rm_file(f"{self._root}/{name}")

    @contextmanager
    def _reaching(self, action: str, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as failure:  # every storage library has its own exceptions
            reason = str(failure).strip().partition("\n")[0] or type(failure).__name__
            what, advice = f"cannot {action} {self.url}/{name}".rstrip("/"), "check the URL, the network and the credentials"
            raise self._error(f"{what}: {reason}", advice=advice) from failure
