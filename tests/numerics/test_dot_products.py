"""Arm's dot products without an Arm processor: LLVM's code for one, and what that code computes in an emulator."""

import platform

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir
from unicorn import UC_ARCH_ARM64, UC_MODE_ARM, Uc, arm64_const

from isograd.numerics import numba_dot
from isograd.runtime.numba_compile import has_dotprod, processor_features

LINUX, MACOS = "aarch64-unknown-linux-gnu", "arm64-apple-darwin23"
DOTPROD = next(engine for engine in numba_dot.ENGINES if engine.name == "dotprod")


@pytest.fixture(scope="module", autouse=True)
def compilers():
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


@pytest.mark.parametrize(
    ("triple", "name", "features", "expected"),
    [
        (LINUX, "neoverse-n1", "+neon,+fp-armv8", True),  # as Linux tells it: the feature follows from the name alone
        (MACOS, "apple-m1", "", True),
        (LINUX, "generic", "+neon,+dotprod", True),
        (LINUX, "neoverse-n1", "-dotprod", False),
        (LINUX, "cortex-a72", "+neon", False),
        (LINUX, "generic", "+neon", False),
        ("x86_64-unknown-linux-gnu", "znver4", "", False),
    ],
)
def test_which_processors_have_dot_products(triple, name, features, expected):
    assert has_dotprod(triple, name, features) == expected


def test_this_processor():
    arm = platform.machine().lower() in ("aarch64", "arm64")
    assert arm or "dotprod" not in processor_features()


def tile_of(triple, name):
    """The code of a tile for a processor: LLVM's machine for it, and the module."""
    module, words, longs = ir.Module(), ir.IntType(32).as_pointer(), ir.IntType(64).as_pointer()
    module.triple = triple
    kind = ir.FunctionType(ir.VoidType(), [words, words, ir.IntType(64), longs, words])
    function = ir.Function(module, kind, "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    numba_dot.tile_code(DOTPROD, builder, *function.args)
    builder.ret_void()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=name, opt=3)
    parsed = llvm.parse_assembly(str(module))
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return machine, parsed


@pytest.mark.parametrize(("triple", "name"), [(LINUX, "neoverse-n1"), (LINUX, "neoverse-v2"), (MACOS, "apple-m1")])
def test_the_loop_holds_its_sums_in_registers_and_takes_words_from_lanes(triple, name):
    machine, module = tile_of(triple, name)
    lines = machine.emit_assembly(module).splitlines()
    dots = [i for i, line in enumerate(lines) if line.strip().startswith("sdot")]
    assert len(dots) == 4 * DOTPROD.rows
    assert all(lines[i].rstrip().endswith(tuple(f"[{lane}]" for lane in range(4))) for i in dots)
    assert not [line for line in lines[dots[0] : dots[-1]] if "[sp" in line]


def text_of(elf):
    """The machine code in an object file."""
    header = np.frombuffer(elf, np.uint8)
    sections, size = int(header[40:48].view(np.uint64)[0]), int(header[58:60].view(np.uint16)[0])
    count, names = (int(header[i : i + 2].view(np.uint16)[0]) for i in (60, 62))
    tables = [header[sections + i * size :][:size] for i in range(count)]
    where = [(int(t[24:32].view(np.uint64)[0]), int(t[32:40].view(np.uint64)[0])) for t in tables]
    found = {}
    for table, (offset, length) in zip(tables, where, strict=True):
        at = where[names][0] + int(table[:4].view(np.uint32)[0])
        found[elf[at : elf.index(b"\0", at)].decode()] = elf[offset : offset + length]
    assert not [name for name in found if name.startswith(".rela.text")]
    return found[".text"]


def emulated(code, a, b, groups, z):
    """The sums after a tile's code ran on an Arm processor that has all features."""
    machine = Uc(UC_ARCH_ARM64, UC_MODE_ARM)
    machine.ctl_set_cpu_model(arm64_const.UC_CPU_ARM64_MAX)
    places = [0x100000 * (i + 1) for i in range(5)]
    for place in places:
        machine.mem_map(place, 0x100000)
    for place, data in zip(places, (code, a.tobytes(), b.tobytes(), z.tobytes()), strict=False):
        machine.mem_write(place, data)
    machine.reg_write(arm64_const.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # vectors are allowed
    arguments = zip(range(4), (places[1], places[2], groups, places[3]), strict=True)
    for i, value in arguments:
        machine.reg_write(arm64_const.UC_ARM64_REG_X0 + i, value)
    machine.reg_write(arm64_const.UC_ARM64_REG_SP, places[4] + 0x80000)
    end = places[4] + 0xFF000
    machine.reg_write(arm64_const.UC_ARM64_REG_LR, end)
    machine.emu_start(places[0], end)
    return np.frombuffer(bytes(machine.mem_read(places[3], z.nbytes)), np.int64).reshape(z.shape)


def digits(x):
    low = (x + 128) % 256 - 128
    return (x - low) // 256, low


@pytest.mark.parametrize("groups", [1, 2, numba_dot.TERMS // 4])
@pytest.mark.parametrize("data", ["random", "largest", "opposite"])
def test_the_sums_of_a_tile(groups, data):
    rng = np.random.default_rng(groups)
    rows, lanes, k = DOTPROD.rows, DOTPROD.lanes, 4 * groups
    a, b = rng.integers(-32639, 32640, (rows, k)), rng.integers(-32639, 32640, (k, lanes))
    if data != "random":  # digits 127 and -128, and those or their opposites
        a[:], b[:] = 127 * 256 - 128, (127 * 256 - 128) * (1 if data == "largest" else -1)
    z = rng.integers(-(2**40), 2**40, (rows, lanes))
    left = np.stack([d.reshape(rows, groups, 4).transpose(1, 0, 2) for d in digits(a)], 1).astype(np.int8)
    right = np.stack([d.reshape(groups, 4, lanes).transpose(0, 2, 1) for d in digits(b)], 1).astype(np.int8)
    machine, module = tile_of(LINUX, "neoverse-n1")
    sums = emulated(text_of(machine.emit_object(module)), left, right, groups, z)
    assert sums.tolist() == (z + a @ b).tolist()
