"""Splits a causal LM into stages, and its experts over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from overlap1f1b.engine import split_blocks
from overlap1f1b.integrations.transformers.experts import adopt
from overlap1f1b.integrations.transformers.finding import Found, adapter_in, find
from overlap1f1b.integrations.transformers.loading import load_stages
from overlap1f1b.integrations.transformers.saving import save_stage, write_index
from overlap1f1b.integrations.transformers.shell import Shell
from overlap1f1b.integrations.transformers.stage import LanguageModelStage, Layer, Place
from overlap1f1b.schedule import Placement, Program

IGNORED = -100
"""Label of a token that does not count, as in transformers."""


class SplitModel(Mapping[int, LanguageModelStage]):
    """The stages of this rank by their number, for an :class:`~overlap1f1b.Engine`.

    Args:
        model: The causal LM that was split.
        stages: Of this rank.
        placement: Which rank holds which stage.
        mesh: That it was split over.
    """

    def __init__(
        self, model: Any, stages: Mapping[int, LanguageModelStage], placement: Placement, mesh: DeviceMesh | None
    ) -> None:
        self.model, self._stages, self._placement, self._mesh = model, dict(stages), placement, mesh

    def __getitem__(self, number: int) -> LanguageModelStage:
        return self._stages[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._stages)

    def __len__(self) -> int:
        return len(self._stages)

    @staticmethod
    def loss_fn(loss: Tensor, *_: Tensor) -> Tensor:
        """The model's own loss of a microbatch: that of its ``forward(labels=target)``, auxiliary losses included.

        Predictions are of the next token, labels of −100 do not count, and it is the mean over the microbatch's tokens
        that do. A loss of one's own is a function ``(own_loss, logits [B, S, V], labels) → scalar``.
        """
        return loss

    @staticmethod
    def count_tokens(labels: Tensor, *_: Tensor) -> int:
        """Tokens that count in a microbatch's loss, for an engine whose loss is to be the mean over tokens."""
        return int((labels[..., 1:] != IGNORED).sum())

    @property
    def routers(self) -> list[nn.Module]:
        """Modules of this rank's layers that the model takes router logits from."""
        places = [stage.__dict__["place"] for stage in self._stages.values()]
        return [router for p in places for n in range(p.start, p.end) for router, _ in p.shell.routers(n)]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank, by their names in the model; of experts this rank's part."""
        for stage in self._stages.values():
            yield from stage.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this rank."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the model's state dict."""
        return {name: value for stage in self._stages.values() for name, value in stage.state_dict().items()}

    def save_pretrained(self, folder: Path | str) -> None:
        """Writes the whole model to a folder that ``from_pretrained`` opens, a file a stage. All ranks must call this.

        No rank holds more than its stages, with all experts of one of them. Weights of an earlier save in the folder
        are replaced.

        Raises:
            ValueError: The model has adapters, such as LoRA's.
        """
        if (adapter := adapter_in(self.model)) is not None:  # somewhere in it, so that all ranks say so
            raise ValueError(
                f"{adapter[0] or 'the model'} ({type(adapter[1]).__name__}) is an adapter, and what would be written "
                "neither one nor a model; allowed: adapters that are merged first, or state_dict() of each rank"
            )
        folder, at = Path(folder), _coordinate(self._mesh)
        for number, stage in self._stages.items():
            if self._placement.replicas(number)[0] == at.get("pp", 0) and at.get("dp", 0) == 0:
                save_stage(folder, number, self._placement.stages, stage, self.model, writes=at.get("ep", 0) == 0)
        if self._mesh is not None:
            dist.barrier()
        if not any(at.values()):
            write_index(folder, self._placement.stages, self.model)
        if self._mesh is not None:
            dist.barrier()

    def load_pretrained(self, folder: Path | str, device: torch.device | str | None = None) -> None:
        """Fills this rank's part from a local folder of pretrained weights, and reads no more than that of it.

        >>> with torch.device("meta"):  # takes no memory
        ...     model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        >>> stages = split_model(model, program, mesh)
        >>> stages.load_pretrained(folder)  # before engine and optimizer, which need the parameters

        Args:
            folder: With ``model.safetensors.index.json`` or ``model.safetensors``, of the layout in which the model's
                checkpoints are published, or in which its modules are.
            device: For parameters on the meta device; that of the mesh by default, the processor without one.

        Raises:
            ValueError: The folder has neither file, lacks a tensor, or has one of another shape.
        """
        device = torch.device(device or (self._mesh.device_type if self._mesh is not None else "cpu"))
        load_stages(Path(folder), self.model, self._stages.values(), device)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what :meth:`state_dict` of the same rank gave.

        Raises:
            RuntimeError: Other names or shapes.
        """
        for stage in self._stages.values():
            stage.load_state_dict({name: state[name] for name in stage.state_dict() if name in state})

    def train(self, mode: bool = True) -> SplitModel:
        """Sets the model to training, or evaluation."""
        self.model.train(mode)
        return self

    def eval(self) -> SplitModel:
        """Sets the model to evaluation."""
        return self.train(False)


def split_model(
    model: nn.Module,
    program: Program,
    mesh: DeviceMesh | None = None,
    *,
    inputs: Sequence[str] = ("input_ids",),
    weights: Sequence[float] | None = None,
    grouped: bool | None = None,
) -> SplitModel:
    """The stages of this rank of a causal LM of the transformers library, its experts spread over "ep".

    >>> program = o1.build_schedule("dualpipev", ranks=2, microbatches=8)
    >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    >>> stages = split_model(AutoModelForCausalLM.from_config(config), program, mesh)
    >>> engine = o1.Engine(stages, program, mesh=mesh, loss_fn=stages.loss_fn)
    >>> result = engine.step(input_ids, target=labels)

    Every rank gives the whole model with the same weights, or on the meta device, to be filled afterwards
    (:meth:`SplitModel.load_pretrained`), and keeps its part: the memory of other ranks' layers and experts is
    freed. The model's classes stay as they are. Each layer is called with what the model's own forward gives it, so
    every stage computes masks and rotary embeddings by the model's own code, from the step's inputs, which travel
    along. Norm, head and loss are those of the model's own forward, too, and so is the router's auxiliary loss,
    over the layers of all stages (``config.output_router_logits``), whose logits travel.

    Args:
        model: A causal LM with experts, as it was built or loaded.
        program: What will be played; its placement says which rank holds which stage.
        mesh: With any of the dimensions "pp", "dp" and "ep"; None for one rank.
        inputs: Names of the model's arguments that a step's inputs are, in their order: ``input_ids`` and, for example,
            ``attention_mask`` or ``position_ids``. A step takes them as a tuple, or as a mapping by these names, such
            as what a tokenizer returns; None is one that is not given this step.
        weights: Of the layers, where stages are not to have equally many.
        grouped: Whether experts whose weights are laid out in the usual way (``gate_up_proj [E, 2·I, H]``, ``down_proj
            [E, H, I]``) run as the engine's grouped products, with their weight gradients apart, instead of by the
            model's own forward. By default they do where several ranks share them; on one rank the model's own forward
            gives bit-equal gradients.

    Raises:
        ValueError: A dense, quantised or encoder-decoder model, one whose experts or layers are not recognised, more
            stages than layers, experts that are not divisible by the ranks, or, where these are made the engine's,
            experts with an adapter.
    """
    found = find(model)
    placement = program.placement
    if placement.stages > len(found.layers):
        raise ValueError(f"{len(found.layers)} layers for {placement.stages} stages; allowed: at least one a stage")
    names = tuple(inputs)
    if not names or names[0] != "input_ids":
        raise ValueError(f"inputs {list(names)}; allowed: input_ids, and others behind it")
    shell = Shell(model, found)
    around = shell.trace()
    coordinate = _coordinate(mesh)
    parts = split_blocks(found.layers, placement.stages, weights)
    held = sorted({stage for _, stage in placement.places(coordinate.get("pp", 0))})
    last = placement.stages - 1
    starts = [sum(map(len, parts[:number])) for number in range(placement.stages + 1)]
    group = mesh.get_group("ep") if mesh is not None and "ep" in coordinate and mesh["ep"].size() > 1 else None
    if group is not None or grouped:
        for name, (module, count) in found.experts.items():
            adopt(model, module, count, group, name, grouped=grouped is not False)
    ties = _untie(shell, found, [range(*pair) for pair in pairwise(starts)]) if last else {}
    stages = {}
    for number in held:
        place = Place(
            shell, number, starts[number], starts[number + 1], first=number == 0, last=number == last, inputs=names
        )
        stages[number] = _stage(place, found, {name: pair[number == last] for name, pair in ties.items()})
    kept = {id(p) for stage in stages.values() for p in stage.parameters()}
    if any(id(p) not in kept for p in model.parameters()):
        _free(found, around.before if 0 not in held else {}, around.after if last not in held else {}, kept)
    return SplitModel(model, stages, placement, mesh)


def _coordinate(mesh: DeviceMesh | None) -> dict[str, int]:
    """This rank's place along each dimension."""
    if mesh is None:
        return {}
    if not mesh.mesh_dim_names:
        raise ValueError("mesh without names of its dimensions; allowed: any of 'pp', 'dp', 'ep'")
    return dict(zip(mesh.mesh_dim_names, mesh.get_coordinate() or (), strict=True))


def _untie(shell: Shell, found: Found, parts: Sequence[range]) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """Gives what comes after the layers copies of parameters that it shares with what comes before them.

    Returns:
        Both, by the name before the layers.

    Raises:
        ValueError: Another parameter belongs to two stages.
    """
    names = {id(p): f"{name}.{label}" for name, m in shell.around.before.items() for label, p in m.named_parameters()}
    ties: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in {part for after in shell.around.after.values() for part in after.modules()}:
        for label, parameter in list(module.named_parameters(recurse=False)):
            if (name := names.get(id(parameter))) is not None:
                if name not in ties:
                    copy = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                    ties[name] = (parameter, copy)
                module.register_parameter(label, ties[name][1])
    seen: dict[int, int] = {}
    held = [[found.layers[number] for number in part] for part in parts]
    for number, modules in enumerate(held):
        ends = [*(shell.around.before.values() if number == 0 else ())]
        ends += shell.around.after.values() if number == len(parts) - 1 else ()
        for label, parameter in nn.ModuleList([*ends, *modules]).named_parameters():
            if seen.setdefault(id(parameter), number) != number:
                raise ValueError(
                    f"parameter {label.partition('.')[2]} belongs to stages {seen[id(parameter)]} and {number}; "
                    "allowed: shared inside a stage, or between what is before and after the layers"
                )
    return ties


def _stage(place: Place, found: Found, tied: Mapping[str, nn.Parameter]) -> LanguageModelStage:
    around, numbers = place.shell.around, range(place.start, place.end)
    kept = {f"{found.prefix}.{number}": found.layers[number] for number in numbers}
    before, after = around.before if place.first else {}, around.after if place.last else {}
    blocks = []
    for number in numbers:
        beside = [
            *(before.values() if number == place.start else ()),
            *(after.values() if number == place.end - 1 else ()),
        ]
        recorded = getattr(getattr(place.shell.model, "config", None), "output_router_logits", False)
        gates = place.shell.routers(number) if recorded else []
        blocks.append(Layer(place, number, found.layers[number], gates, beside))
    ends = place.first or place.last
    return LanguageModelStage(place, blocks, {**before, **kept, **after}, tied if ends else {})


def _free(found: Found, before: Mapping[str, nn.Module], after: Mapping[str, nn.Module], kept: set[int]) -> None:
    """Lets go of the weights of other ranks' parts; their modules stay, for what the forward asks of them."""
    for module in (*found.layers, *before.values(), *after.values()):
        if not any(id(p) in kept for p in module.parameters()):
            module.to("meta")
