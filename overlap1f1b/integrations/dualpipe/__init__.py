"""The public surface of the DualPipe repository (github.com/deepseek-ai/DualPipe) on the engine."""

from overlap1f1b.integrations.dualpipe.pipe import DualPipe, DualPipeV, set_p2p_tensor_dtype, set_p2p_tensor_shapes

__all__ = ["DualPipe", "DualPipeV", "set_p2p_tensor_dtype", "set_p2p_tensor_shapes"]
