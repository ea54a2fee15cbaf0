"""What Trainer's own code gets in place of its accelerator, its dataloader and its model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any, Self

import accelerate.accelerator
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import find_batch_size, operations
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from overlap1f1b.cut.replacement import replaced
from overlap1f1b.integrations.transformers.adapters import base_of

Inputs = dict[str, Any]
Prediction = tuple[Any, Any, Any]
"""Loss, logits and labels of a batch, as ``Trainer.prediction_step`` returns them."""


class ShardedAccelerator(Accelerator):
    """An accelerator whose processes are the ranks with data of their own: "dp" × "ep", the same along "pp".

    So data loaders, counts of tokens and gathered metrics treat the ranks of a pipeline as one. Gradients are the
    engine's: :meth:`backward` only keeps the loss that it is given.
    """

    loss: Tensor | None = None
    """Loss of the microbatch that was last given to :meth:`backward`, with its graph."""
    _group: Any = None
    _shards, _shard = 1, 0  # number of ranks with data, and of this one among them

    def share(self, mesh: DeviceMesh | None) -> None:
        """Set the ranks that have data; ``mesh`` has the dimensions "pp", "dp" and "ep", None for one rank."""
        self.dataloader_config.dispatch_batches = False  # each rank reads its own data
        if mesh is not None:
            data = mesh["dp", "ep"]._flatten("data")
            self._group, self._shards, self._shard = data.get_group(), data.size(), data.get_local_rank()

    @property
    def device(self) -> torch.device:
        """The rank's device; the CPU without a launcher's number: moving a batch to "cpu:1" would copy its tensors."""
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def num_processes(self) -> int:
        """Number of ranks with data of their own."""
        return self._shards

    @property
    def process_index(self) -> int:
        """Number of this rank among these; the same along "pp"."""
        return self._shard

    def gather(self, tensor: Any) -> Any:
        """Concatenate tensors, or nested ones, of the ranks with data of their own along the first dimension."""

        def gathered(tensor: Tensor) -> Tensor:
            whole = tensor.reshape(1) if tensor.dim() == 0 else tensor.contiguous()
            parts = [torch.empty_like(whole) for _ in range(self._shards)]
            dist.all_gather(parts, whole, group=self._group)
            return torch.cat(parts)

        return tensor if self._shards == 1 else recursively_apply(gathered, tensor, error_on_other_type=True)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors, or nested ones, over the ranks with data of their own, as accelerate does over processes."""
        return recursively_apply(self._reduced, tensor, reduction, error_on_other_type=True)

    def _reduced(self, tensor: Tensor, reduction: str) -> Tensor:
        whole = tensor.clone()
        if self._shards > 1:
            dist.all_reduce(whole, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM, group=self._group)
            if reduction == "mean":
                whole /= self._shards
        return whole

    def pad_across_processes(self, *args: Any, **kwargs: Any) -> Any:
        """Pad tensors, or nested ones, to the largest size of all ranks with data of their own."""
        with replaced([(vars(operations), "gather", self.gather)]):
            return super().pad_across_processes(*args, **kwargs)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather tensors, or lists of objects, without the rows that only fill the last batch of several ranks."""
        with replaced([(vars(accelerate.accelerator), "gather_object", self._listed)]):
            return super().gather_for_metrics(input_data, use_gather_object)

    def _listed(self, objects: Sequence[Any]) -> list[Any]:
        parts = [objects] * self._shards
        if self._shards > 1:
            dist.all_gather_object(parts, objects, group=self._group)
        return [one for part in parts for one in part]

    def backward(self, loss: Tensor, **_: Any) -> None:
        """Keep the loss of a microbatch, whose backward the engine plays."""
        self.loss = loss


class Ahead:
    """A dataloader that is read ``count`` batches ahead: a pipeline needs several microbatches to be full.

    accelerate's dataloaders say when they are at their last batch, so that metrics drop the rows that pad it. This one
    says it at the same batch, although it was read before. If batches are ``whole``, with the rows of all ranks, the
    last one tells how many there are in data without a length, as accelerate's dataloader for such data does.
    """

    def __init__(self, loader: Any, count: int, *, whole: bool = False) -> None:
        self._loader, self._count, self._whole, self._ended = loader, count, whole, False
        self.batches: list[Inputs] = []  # that were read together
        self._read_as: list[Inputs] = []
        self.steps: dict[int, Prediction | None] = {}  # of batches by their numbers; None on a rank without a loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Inputs]:
        batches = iter(self._loader)
        while self._read(batches):
            for number, batch in enumerate(self.batches):
                self.at(number)
                yield batch

    def _read(self, batches: Iterator[Inputs]) -> list[Inputs]:
        """Read the next batches of the loader, as many as are played together or are left."""
        self.batches, self.steps, self._ended = [], {}, False
        for batch in batches:
            self.batches.append(batch)
            self._ended = bool(getattr(self._loader, "end_of_dataloader", False))
            if self._ended and self._whole and getattr(self._loader, "remainder", None) == -1:
                self._loader.remainder = find_batch_size(batch) or -1
            if self._ended or len(self.batches) == self._count:  # one more would end the last batch
                break
        self._read_as = list(map(dict, self.batches))
        return self.batches

    def number(self, batch: Inputs) -> int | None:
        """Return the number of a batch among the batches read together; None for another or a changed batch."""
        for number, (one, read_as) in enumerate(zip(self.batches, self._read_as, strict=True)):
            if one is batch and one.keys() == read_as.keys() and all(one[name] is read_as[name] for name in one):
                return number
        return None

    def at(self, number: int) -> None:
        """Let the dataloader say whether it is at its last batch, as if it was at this one."""
        if self._ended:
            self._loader.end_of_dataloader = number == len(self.batches) - 1


OF_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Entries of a packed batch that repeat what its position_ids say."""


class RestOfModel(nn.Module):
    """The model after its last layer, called as the whole model with the inputs of one microbatch.

    It has the attributes of the whole ``model``. Layers have run through the inputs ``names`` of the ``batch``,
    ``finish`` runs the rest with the arguments of a call, and ``caller`` names the trainer in messages.
    """

    def __init__(
        self, model: Any, names: Sequence[str], batch: Inputs, finish: Callable[[Mapping[str, Any]], Any], caller: str
    ) -> None:
        super().__init__()
        self.__dict__["_model"] = model  # not a module of this one
        self.names, self.batch, self.finish, self.caller = names, batch, finish, caller
        self._read = self._versions()
        self.training = model.training

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)

    @property
    def device(self) -> torch.device:
        """Device of the batch; the whole model's is that of its first parameter, which may be on another rank."""
        found: torch.device = self.batch[self.names[0]].device
        return found

    def train(self, mode: bool = True) -> Self:
        """Set the mode; the modules of the rank's stages have theirs already."""
        self.training = mode
        return self

    def _whole(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            "parameters or modules of the model in a loss, of which a rank has a part and whose gradients would be "
            "lost; allowed: calling the model, its config, or weight_decay"
        )

    parameters = named_parameters = state_dict = modules = named_modules = children = _whole

    def _versions(self) -> dict[str, int]:
        """Return how often each input was changed in place."""
        tensors = {name: self.batch.get(name) for name in self.names}
        return {name: 0 if value is None or value.is_inference() else value._version for name, value in tensors.items()}

    def _get_name(self) -> str:
        # Trainer asks for the class inside PEFT's model, but of PEFT's class alone.
        return type(base_of(self.__dict__["_model"])).__name__

    def forward(self, *positional: Any, **arguments: Any) -> Any:
        """Finish a forward whose layers have run: the model's own loss from the last hidden states."""
        if positional:
            arguments = {**signature(self.__dict__["_model"].forward).bind_partial(*positional).arguments, **arguments}
        versions = self._versions()
        for name in self.names:
            if arguments.get(name) is not self.batch.get(name) or versions[name] != self._read[name]:
                raise ValueError(
                    f"{self.caller} calls the model with another {name} than the batch has; "
                    "allowed: the inputs of the batch, through which its layers have already run"
                )
        allowed = (*self.names, "labels", "shift_labels")  # inputs, and what the loss takes
        model = self.__dict__["_model"]
        # Attention takes them from position_ids, but short convolutions need them.
        derived = () if any(isinstance(module, nn.Conv1d) for module in model.modules()) else OF_PACKED
        for name in sorted((arguments.keys() & self.batch.keys()) - {*allowed, *derived}):  # layers ran without it
            raise ValueError(f"a batch with {name}, given to the model; allowed: {', '.join(allowed)}")
        return self.finish(arguments)
