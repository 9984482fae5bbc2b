"""Turns a bind to every address into a bind to 127.0.0.1, inside TensorFlow's libraries and nowhere else.

A run on one machine must not be reachable from another, but TensorFlow's gRPC server binds "0.0.0.0:PORT", a constant
in grpc_server_lib.cc that no option changes. To preload a shim takes a compiler, a network namespace or a firewall rule
takes rights that a user may not have, and a bound socket cannot be moved. So this replaces the pointers through which
TensorFlow calls libc's `bind` and `listen`: its slots in the global offset table (System V ABI, chapter 5).
"""

import ctypes
import errno
import functools
import mmap
import os
import platform
import socket
import struct
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

# Relocations that store a function's address, JUMP_SLOT and GLOB_DAT, from each processor's supplement to the ABI.
FUNCTION_RELOCATIONS = {"x86_64": (7, 6), "aarch64": (1026, 1025)}
# Tags in a library's dynamic section, from <elf.h>; the second row are addresses.
DT_PLTRELSZ, DT_RELASZ, DT_RELACOUNT = 2, 8, 0x6FFFFFF9
DT_STRTAB, DT_SYMTAB, DT_RELA, DT_JMPREL, DT_GNU_HASH = ADDRESSES = (5, 6, 7, 23, 0x6FFFFEF5)

# With `use_errno` on both sides, errno passes from the real call, through the interpreter, to TensorFlow.
Bind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True)
Listen = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, use_errno=True)


def listen_on_loopback_only() -> bool:
    """Makes every server that TensorFlow, once imported, starts in this process listen on 127.0.0.1 only.

    False: nothing is promised, since TensorFlow is not loaded, or the platform, the libc or the layout is unknown.
    """
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            slots = sorted(_slots(memory.fileno()))  # "bind" first: without it, "listen" would refuse every server.
        for name, slot in slots:
            _store(slot, _replacements()[name])
    except (AttributeError, LookupError, OSError, OverflowError, TypeError, ValueError, struct.error):
        return False
    return bool(slots)


def on_loopback(address: bytes) -> bytes:
    """The same C sockaddr, with 127.0.0.1 for a wildcard; ::ffff:127.0.0.1 in IPv6, since gRPC's socket takes both."""
    family = int.from_bytes(address[:2], sys.byteorder)
    if family == socket.AF_INET and address[4:8] == bytes(4):
        return address[:4] + socket.inet_aton("127.0.0.1") + address[8:]
    if family == socket.AF_INET6 and address[8:24] in (bytes(16), socket.inet_pton(family, "::ffff:0.0.0.0")):
        return address[:8] + socket.inet_pton(family, "::ffff:127.0.0.1") + address[24:]
    return address


# Waiting for the interpreter lock cannot deadlock here: TensorFlow calls both on the thread that asks for the server,
# which either holds the lock already or has released it (seen in 2.21 with a debugger).
@functools.cache  # The cache keeps them alive: TensorFlow's pointers to them are no references that Python counts.
def _replacements() -> dict[str, "ctypes._FuncPointer"]:
    libc = ctypes.CDLL(None)
    bind, listen = Bind(("bind", libc)), Listen(("listen", libc))

    def bind_on_loopback(descriptor: int, address: int | None, length: int) -> int:
        replaced = on_loopback(ctypes.string_at(address, length)) if address else None
        return int(bind(descriptor, replaced, length))

    # A Ctrl-C that arrived while TensorFlow ran is raised in the first Python code that follows, which can be the
    # function above. ctypes then drops it and reports success, and to listen on an unbound socket takes any address.
    def listen_if_on_loopback(descriptor: int, backlog: int) -> int:
        with socket.socket(fileno=os.dup(descriptor)) as bound:
            host = bound.getsockname()[0]
        if host in ("127.0.0.1", "::ffff:127.0.0.1"):
            return int(listen(descriptor, backlog))
        ctypes.set_errno(errno.EADDRNOTAVAIL)
        return -1

    return {"bind": Bind(bind_on_loopback), "listen": Listen(listen_if_on_loopback)}


def _slots(memory: int) -> Iterator[tuple[str, int]]:
    """(name, address) of each pointer to replace. The kernel reads `memory`, so a bad address is an error, no crash."""
    kinds = FUNCTION_RELOCATIONS[platform.machine()]
    for base, dynamic in _tensorflow_libraries(memory):
        # What the library takes from others comes first; the hash table counts it. Names are cut to 7 bytes.
        _, count = struct.unpack("2I", os.pread(memory, 8, dynamic[DT_GNU_HASH]))
        table = struct.iter_unpack("IBBHQQ", os.pread(memory, 24 * count, dynamic[DT_SYMTAB]))
        symbols = {_string(memory, dynamic[DT_STRTAB] + name, 7): index for index, (name, *_) in enumerate(table)}
        names = {symbols[name] << 32 | kind: name for name in {"bind", "listen"} & symbols.keys() for kind in kinds}
        if names:
            # Three words for each that names a symbol, which the first DT_RELACOUNT do not: where, what kind, addend.
            skip = 24 * dynamic.get(DT_RELACOUNT, 0)
            calls = os.pread(memory, dynamic[DT_PLTRELSZ], dynamic[DT_JMPREL])
            words = array("Q", calls + os.pread(memory, dynamic[DT_RELASZ] - skip, dynamic[DT_RELA] + skip))
            slots = [(names[info], base + words[3 * i]) for i, info in enumerate(words[1::3]) if info in names]
            if {name for name, _ in slots} != {"bind", "listen"}:
                raise LookupError("Expected pointers to both bind and listen")
            yield from slots


def _tensorflow_libraries(memory: int) -> Iterator[tuple[int, dict[int, int]]]:
    """(load address, dynamic section) of each, from the dynamic linker's list: r_debug and link_map in <link.h>."""
    r_debug = ctypes.addressof(ctypes.c_void_p.in_dll(ctypes.CDLL(None), "_r_debug"))
    (link_map,) = struct.unpack("Q", os.pread(memory, 8, r_debug + 8))
    while link_map:
        base, path, entry, link_map = struct.unpack("4Q", os.pread(memory, 32, link_map))
        if "tensorflow" in os.path.basename(_string(memory, path, 4096)):
            dynamic: dict[int, int] = {}
            while 0 not in dynamic:  # DT_NULL, the last
                tag, value = struct.unpack("qQ", os.pread(memory, 16, entry))
                # glibc has already added the load address to these.
                dynamic[tag] = value + base if tag in ADDRESSES and value < base else value
                entry += 16
            yield base, dynamic


def _string(memory: int, address: int, limit: int) -> str:
    return os.fsdecode(os.pread(memory, limit, address).split(b"\0")[0])


def _store(slot: int, function: "ctypes._FuncPointer") -> None:
    """Writes one pointer, lifting the protection of a page that was made read-only after relocation (RELRO)."""
    page, size = ctypes.c_void_p(slot - slot % mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE)
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    # The first field has the bounds, the second what is allowed, such as "rw-p".
    maps = [line.split()[:2] for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [([int(bound, 16) for bound in span.split("-")], flags) for span, flags in maps]
    read_only = "w" not in next((flags for (start, end), flags in spans if start <= slot < end), "")
    if read_only and mprotect(page, size, mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "mprotect")
    ctypes.c_void_p.from_address(slot).value = ctypes.cast(function, ctypes.c_void_p).value
    if read_only:
        mprotect(page, size, mmap.PROT_READ)
