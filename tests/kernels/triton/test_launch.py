"""Tiles, and what the compiler makes of the kernels for a GPU of compute capability 9.0, which it needs none for."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from overlap1f1b.kernels.permute import Layout
from overlap1f1b.kernels.routing import Rule
from overlap1f1b.kernels.triton import combine, fp8, grouped_mm, permute, routing, slots, swiglu
from overlap1f1b.kernels.triton.launch import SUMMED, TILE, Kernel, tile
from tests.tiers import wide

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32", torch.int16: "i16"}
NAMES[torch.float8_e4m3fn] = "fp8e4nv"


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (2048, (1, 2048)),
        (7168, (2, 1024)),
        (768, (8, 256)),
        (2880, (2, 1024)),
        (257, (16, 128)),
        (30, (64, 32)),
        (1, (2048, 1)),
    ],
)
def test_tiles_leave_little_empty(width: int, expected: tuple[int, int]) -> None:
    assert tile(width) == expected


def test_rows_that_are_summed_lie_within_a_warp() -> None:
    assert tile(2048, 2 * TILE, SUMMED) == (8, 512)


class Compiled(NamedTuple):
    """A kernel and its code."""

    name: str
    ptx: str


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Compiled]]:
    """Compiles what a function would launch, with the types, numbers and divisibility that its arguments have."""
    if torch.cuda.is_available() or triton.knobs.runtime.interpret:
        pytest.skip("on a GPU the other tests compile, and the interpreter cannot")
    found: list[Compiled] = []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        options = {name: given.pop(name) for name in ("num_warps", "num_stages") if name in given}
        signature, constants, attributes = {}, {}, {}
        for number, (parameter, value) in enumerate(zip(self.params, [*args, *given.values()], strict=True)):
            name = parameter.name
            one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
            if parameter.is_constexpr or one:
                signature[name], constants[name] = "constexpr", given.get(name, value)
                continue
            if isinstance(value, torch.Tensor):
                signature[name] = "*" + NAMES[value.dtype]
            else:
                signature[name] = "i32" if isinstance(value, int) else "fp32"
            if isinstance(value, torch.Tensor) or (value % 16 == 0 and not parameter.do_not_specialize):
                attributes[(number,)] = [["tt.divisibility", 16]]
        source = ASTSource(self, signature, constants, attributes)
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        found.append(Compiled(self.__name__, code.asm["ptx"]))

    monkeypatch.setattr(JITFunction, "run", compile_only)

    def compiled_by(function: Callable[..., Any], *args: Any) -> list[Compiled]:
        found.clear()
        function(*args)
        return list(found)

    return compiled_by


T, H, K, E, INTERMEDIATE = 64, 2048, 8, 128, 768


def half(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def whole(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


Call = tuple[Callable[..., Any], tuple[Any, ...]]


def moves(T: int, H: int, K: int, E: int, intermediate: int) -> list[Call]:
    """Every launcher that moves rows, with pointers of any alignment left out."""
    flat, layout = whole(T * K), Layout.of(half(0, H), half(0, K))
    return [
        (permute.take_rows, (half(T, H), whole(T))),
        (permute.pack_rows, (half(T, H), whole(T, K), half(T, K), None, None, E, layout)),
        (permute.pack_rows, (half(T, H), whole(T, K), half(T, K), whole(3 * T), whole(T, K), E // 4, layout)),
        (permute.expand_rows, (half(T, layout.width), flat, flat, layout, False)),
        (permute.spread_rows, (half(T, H), flat, flat, K, False)),
        (combine.sum_rows, (half(T * K, H), flat, K, half(T * K))),
        (combine.sum_rows, (half(T * K, H + 8)[:, :H], flat, K)),
        (combine.pack_grads, (half(T * K, H), half(T * K), flat, layout)),
        (combine.open_grads, (half(3 * T, layout.width), flat, whole(T, K), layout)),
        (combine.spread_grad, (half(T, H), half(T * K, H), flat, flat, half(T * K))),
        (swiglu.swiglu_rows, (half(T, 2 * intermediate), half(T))),
        (swiglu.swiglu_rows_backward, (half(T, intermediate), half(T, 2 * intermediate), half(T))),
    ]


@pytest.mark.parametrize(
    ("function", "args"), moves(T, H, K, E, INTERMEDIATE), ids=lambda value: getattr(value, "__name__", "")
)
def test_rows_move_16_bytes_at_a_time(compiled: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    ((_, ptx),) = compiled(function, *args)
    wide = re.findall(r"\b(ld|st)\.global\S*\.v4\.b32", ptx)
    assert {"ld", "st"} == set(wide)
    # What is narrower are places and weights, of which each row has one: fewer by far than there are words to a row.
    narrow = re.findall(r"\b(?:ld|st)\.global\S*\.b(?:16|32|64)\s", re.sub(r"\S*\.v4\.b32\s", "", ptx))
    assert len(narrow) <= 4 * K
    assert not re.search(r"\b(atom|red)\.", ptx)  # sums are in one order


def calls(rows: int) -> list[Call]:
    """Every launcher, for a number of rows."""
    rule, flat, sent = Rule(2, normalize=True), whole(2 * rows), half(2 * rows, 40)
    layout = Layout.of(half(0, 40), half(0, 2))
    ends, chosen = torch.zeros(4, dtype=torch.int32), torch.zeros(rows, 2).short()
    return [
        *moves(rows, 40, 2, 4, 40),
        (permute.expand_rows, (half(rows, layout.width), flat, flat, layout, True)),
        (fp8.quantize_rows, (half(rows, 40),)),
        (swiglu.swiglu_rows, (half(rows, 80), half(rows), ends[-1:])),
        (swiglu.swiglu_rows_backward, (half(rows, 40), half(rows, 80), half(rows), ends[-1:])),
        (slots.place_slots, (chosen, 4, 2 * rows)),
        (slots.place_rows, (whole(rows, 2), 8, 2)),
        (slots.place_rows, (whole(rows, 2), 8, 2, rows + 3, rows + 5)),
        (routing.route_tokens, (torch.empty(rows, 4), torch.empty(4), rule)),
        (routing.route_tokens_backward, (torch.empty(rows, 2), None, torch.empty(rows, 4), whole(rows, 2), rule)),
        (grouped_mm.add_weight_grad_, (torch.empty(4, 40, 40), sent, sent, ends)),
    ]


def test_no_number_of_rows_makes_a_kernel_compile_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton's own key of what it has compiled: 1 and multiples of 16 have others where numbers are specialised."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    keys: list[str] = []

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        binder = create_function_from_signature(self.signature, self.params, backend)
        _, specialization, options = binder(*args, **given)
        keys.append(f"{self.__name__} {specialization} {options}")

    monkeypatch.setattr(JITFunction, "run", note)
    found = {}
    for rows in (1, 16, 37, 48):
        keys.clear()
        for function, args in calls(rows):
            function(*args)
        found[rows] = list(keys)
    assert len(found[1]) >= 15
    for rows, seen in found.items():
        assert [(a, b) for a, b in zip(found[37], seen, strict=True) if a != b] == [], rows


class OnDevice(torch.Tensor):
    """Says that it is on a GPU."""

    def get_device(self) -> int:
        return 7


class Driver:
    """A GPU of compute capability 9.0, as far as Triton asks before it launches; the launches are kept."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.utils = self

    def get_current_device(self) -> int:
        return 7

    def get_current_stream(self, device: int) -> int:
        return 1234

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *args: self.launched.append(args)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}

    def load_binary(self, name: str, *_: Any) -> tuple[Any, ...]:
        return None, f"loaded {name}", 0, 0, 1024


def test_later_launches_are_as_tritons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grid, stream, function and arguments, in a class of alignment, dtype and sizes, and in others nothing of it."""
    if torch.cuda.is_available() or triton.knobs.runtime.interpret:
        pytest.skip("on a GPU the kernels' tests launch twice, and the interpreter has no launches")
    driver = Driver()
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 7, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", driver.get_current_stream, raising=False)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    ran: list[str] = []
    run = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda self, *a, **k: ran.append(self.__name__) or run(self, *a, **k))

    def launched(kernel: Kernel, *args: Any) -> tuple[Any, ...]:
        kernel((3, 2), *args)
        return driver.launched.pop()

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_subclass(OnDevice)

    rows, index, out = map(on_device, (half(T, 32), whole(T), half(T, 32)))
    kernel = Kernel(permute._take.function)
    for tensors, constants in (
        ((rows, index, out), (32, 32, 1, 1, 4, 32)),
        ((rows, index[1:], out), (32, 32, 1, 1, 4, 32)),  # aligned to 8 bytes
        ((rows.float(), index, out), (32, 32, 1, 1, 4, 32)),
        ((rows, index, out), (16, 32, 1, 1, 4, 16)),
    ):
        ran.clear()
        first, second = (launched(kernel, tensors, (number,), constants) for number in (40, 1))
        assert ran == ["_take"]
        *head, _, _, a, b, c, count = first[:13]
        assert second[:6] == tuple(head[:6])
        assert second[:5] == (3, 2, 1, 1234, "loaded _take")
        assert second[6:9] == (None, None, None)
        assert (a, b, c) == tensors
        assert second[9:12] == tuple(tensor.data_ptr() for tensor in tensors)
        assert (count, second[12]) == (40, 1)
        assert first[13:] == second[13:] == constants


@pytest.mark.parametrize(
    ("ranks", "local", "room"), [(3, 40, None), *wide((1, 1, 9), (8, 16, None), (8, 16, 9), (64, 4, 9), (2, 256, None))]
)
def test_places_of_rows_compile(compiled: Any, ranks: int, local: int, room: int | None) -> None:
    made = [k.name for k in compiled(slots.place_rows, whole(T, K), ranks * local, ranks, room, T)]
    assert made == ["_count_rows", "_offsets", "_place_rows"]


def test_all_others_compile(compiled: Any) -> None:
    rule = Rule(K, normalize=True)
    chosen = torch.zeros(T, K, dtype=torch.int16)
    assert [k.name for k in compiled(slots.place_slots, chosen, E, T * K)] == ["_count", "_offsets", "_place"]
    compiled(routing.route_tokens, torch.empty(T, E), torch.empty(E), rule)
    compiled(routing.route_tokens_backward, torch.empty(T, K), None, torch.empty(T, E), whole(T, K), rule)
    for rows in (half(T, H + 24)[:, :H], half(2, INTERMEDIATE, H), half(2, INTERMEDIATE, H).mT):
        ((_, ptx),) = compiled(fp8.quantize_rows, rows)
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
        assert set(re.findall(r"\b(ld|st)\.global\S*\.v[24]\.b32", ptx)) == {"ld", "st"}
    main, ends = torch.empty(2, 2 * INTERMEDIATE, H), whole(2)
    ((_, ptx),) = compiled(grouped_mm.add_weight_grad_, main, half(T, 2 * INTERMEDIATE), half(T, H), ends)
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16" in ptx
    assert not re.search(r"\b(atom|red)\.", ptx)
