"""Export of a checkpoint's model as safetensors: whole tensors, which other programs read."""

import json
from pathlib import Path

from overlap1f1b.checkpoint.folder import checkpoint_in
from overlap1f1b.checkpoint.tensors import check_tensors, empty, read_index, read_tensors
from overlap1f1b.schedule.values import check_size, checked

FILE_BYTES = 5_000_000_000


@checked
def consolidate(checkpoint: str | Path, folder: str | Path, *, file_bytes: int = FILE_BYTES) -> Path:
    """Write the model of a checkpoint, whole, as safetensors, and return ``folder``.

    One process calls this, without an engine; it needs memory for one file at a time. The tensors have the names of
    the model's ``state_dict``. One file is ``model.safetensors``; several are ``model-00001-of-00002.safetensors``
    and so on, with ``model.safetensors.index.json``.

    >>> consolidate("runs/x", "exported")
    >>> safetensors.torch.load_file("exported/model.safetensors")

    Args:
        checkpoint: Folder given to ``save_checkpoint``, whose last checkpoint is taken, or one checkpoint in it.
        folder: Folder without such files, made if it does not exist.
        file_bytes: Bytes of a file's tensors, unless one tensor alone has more.

    Raises:
        ValueError: There is no checkpoint, it has no model or is damaged, or ``folder`` has such files.
    """
    from safetensors.torch import save_file

    check_size("file_bytes", file_bytes)
    path, folder = checkpoint_in(Path(checkpoint)), Path(folder)
    if path is None:
        raise ValueError(f"{checkpoint} has no checkpoint; allowed: a folder of save_checkpoint, or a checkpoint in it")
    if others := sorted(folder.glob("model*.safetensors*")):
        raise ValueError(f"{folder} has {others[0].name}; allowed: a folder without such files")
    index = {name: meta for name, meta in read_index(path).items() if name.startswith("model.")}
    if not index:
        raise ValueError(f"{path} has no model, it was saved with model='none'; allowed: one with all or trained")
    check_tensors(path)
    sizes = {name: empty(meta, "meta").nbytes for name, meta in index.items()}
    parts = _parts(sizes, file_bytes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror}; allowed: a folder that can be written") from error
    where: dict[str, str] = {}
    for number, part in enumerate(parts):
        tensors = {name: empty(index[name]) for name in part}
        read_tensors(path, tensors)
        file = "model.safetensors" if len(parts) == 1 else f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        whole = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        save_file(whole, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(whole, file)
    if len(parts) > 1:
        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=1))
    return folder


def _parts(sizes: dict[str, int], file_bytes: int) -> list[list[str]]:
    """Divide tensors by their names into files of at most so many bytes, or of one tensor."""
    parts, size = [list[str]()], 0
    for name, bytes_ in sizes.items():
        if parts[-1] and size + bytes_ > file_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += bytes_
    return parts
