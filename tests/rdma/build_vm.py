"""A kernel with Soft-RoCE and a small first file system for it, made of Debian's packages: see `build`."""

import gzip
import lzma
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

KERNEL = "linux-image-6.12-amd64"  # 6.1 refuses to register a mapping that is only readable
FALLBACK_KERNEL = "linux-image-amd64"
SHELL = "busybox-static"
# Loaded at boot, those that they need first. rdma_rxe asks for crc32 by name, not as a dependency.
MODULES = ("virtio_pci", "9p", "9pnet_virtio", "overlay", "crc32_generic", "ib_uverbs", "rdma_rxe")
FOLDERS = re.compile(
    r"/kernel/(arch|crypto|lib|net|fs|drivers/(virtio|infiniband/(core|sw)|net/(?!ethernet|wireless)))"
)
MODULE = re.compile(r"(?P<name>[^/]+)\.ko(\.xz)?$")
HERE = Path(__file__).parent


class CannotBuild(Exception):
    """A package cannot be had, or lacks what is needed."""


class Kernel:
    """What of a kernel's package is needed: its image and its modules by name."""

    def __init__(self, package: Path) -> None:
        self.image = b""
        self._packed: dict[str, tuple[str, bytes]] = {}
        self._builtin: set[str] = set()
        for name, read in members(package):
            module = MODULE.search(name)
            if "/boot/vmlinuz-" in name:
                self.image = read()
            elif name.endswith("/modules.builtin"):
                self._builtin = {_name(Path(line).stem) for line in read().decode().split()}
            elif module is not None and FOLDERS.search(name):
                self._packed[_name(module["name"])] = name, read()
        if not self.image:
            raise CannotBuild(f"{package.name} holds no kernel")

    def modules(self, wanted: Iterable[str]) -> dict[str, bytes]:
        """Return the requested modules and their dependencies, in the order of loading."""
        loaded: dict[str, bytes] = {}
        for name in wanted:
            self._load(name, loaded)
        return loaded

    def _load(self, name: str, loaded: dict[str, bytes]) -> None:
        if name in loaded or name in self._builtin:
            return
        if name not in self._packed:
            raise CannotBuild(f"the kernel has no module {name}")
        path, packed = self._packed[name]
        content = lzma.decompress(packed) if path.endswith(".xz") else packed
        for needed in _needs(content):
            if needed in self._packed:
                self._load(needed, loaded)
        loaded[name] = content


def _name(name: str) -> str:
    return name.replace("-", "_")


def _needs(module: bytes) -> list[str]:
    """From the notes that a module carries of itself."""
    hard = re.search(rb"\0depends=([^\0]*)\0", module)
    soft = re.search(rb"\0softdep=pre: ([^\0]*)\0", module)
    names = hard[1].decode().split(",") if hard else []
    names += soft[1].decode().split() if soft else []
    return [_name(name) for name in names if name]


def members(package: Path) -> Iterator[tuple[str, "ReadMember"]]:
    """Yield the files of a Debian package; each must be read before the next one."""
    unpacking = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE)
    assert unpacking.stdout is not None
    with tarfile.open(fileobj=unpacking.stdout, mode="r|") as archive:
        for member in archive:
            if member.isfile():
                yield member.name.removeprefix("."), ReadMember(archive, member)
    if unpacking.wait():
        raise CannotBuild(f"{package.name} cannot be unpacked")


class ReadMember:
    def __init__(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self._archive = archive
        self._member = member

    def __call__(self) -> bytes:
        file = self._archive.extractfile(self._member)
        assert file is not None
        return file.read()


class Cpio:
    """An archive that the kernel unpacks as its first file system (format "newc")."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._count = 0

    def add(self, name: str, mode: int, content: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
        self._count += 1
        path = name.encode() + b"\0"
        fields = (self._count, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(path), 0)
        header = b"070701" + b"".join(b"%08x" % field for field in fields) + path
        self._parts += [_padded(header), _padded(content)]

    def finish(self) -> bytes:
        self.add("TRAILER!!!", 0)
        return b"".join(self._parts)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def first_file_system(busybox: bytes, modules: dict[str, bytes]) -> bytes:
    archive = Cpio()
    for folder in ("bin", "dev", "host", "modules", "proc", "root", "scratch", "sys"):
        archive.add(folder, 0o40755)
    archive.add("dev/console", 0o20600, device=(5, 1))
    archive.add("bin/busybox", 0o100755, busybox)
    archive.add("init", 0o100755, (HERE / "init").read_bytes())
    for name, content in modules.items():
        archive.add(f"modules/{name}.ko", 0o100644, content)
    archive.add("modules/order", 0o100644, "".join(f"{name}\n" for name in modules).encode())
    return archive.finish()


def unpacked(image: bytes) -> bytes | None:
    """Return the unpacked kernel inside a bzImage; None if it is packed in an unknown way."""
    sectors = image[0x1F1] or 4
    offset, length = (int.from_bytes(image[at : at + 4], "little") for at in (0x248, 0x24C))
    start = (sectors + 1) * 512 + offset
    payload = image[start : start + length]
    if payload.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMADecompressor().decompress(payload)
    if payload.startswith(b"\x1f\x8b"):
        return gzip.decompress(payload[:-4])
    return None


def download(package: str, folder: Path) -> Path:
    """Check the requirements. Raises CannotBuild."""
    known = sorted(folder.glob(f"{package}_*.deb"))
    if not known:
        command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", "-q", package]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        known = sorted(folder.glob(f"{package}_*.deb"))
        if done.returncode or not known:
            raise CannotBuild(f"apt-get download {package}: {done.stderr.strip()} (run apt-get update?)")
    return known[-1]


def kernel_package() -> str:
    """Return the package that holds the kernel itself."""
    for name in (KERNEL, FALLBACK_KERNEL):
        command = ["apt-cache", "depends", name]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        found = re.search(r"Depends: (linux-image-\S+)", said)
        if found:
            return found[1]
    raise CannotBuild(f"apt knows no package {KERNEL} (run apt-get update?)")


def build(folder: Path) -> None:
    """Make `kernel` and `initrd` in `folder`, if they are not there. Raises CannotBuild."""
    kernel_file, initrd_file = folder / "kernel", folder / "initrd"
    made_s = initrd_file.stat().st_mtime if initrd_file.exists() and kernel_file.exists() else 0.0
    if made_s > max((HERE / name).stat().st_mtime for name in ("init", "build_vm.py")):
        return
    folder.mkdir(parents=True, exist_ok=True)
    kernel = Kernel(download(kernel_package(), folder))
    busybox = next(
        (read() for name, read in members(download(SHELL, folder)) if name.endswith("/busybox")), b""
    )
    modules = kernel.modules(MODULES)
    print(f"modules: {' '.join(modules)}", file=sys.stderr)
    kernel_file.write_bytes(unpacked(kernel.image) or kernel.image)
    initrd_file.write_bytes(first_file_system(busybox, modules))
