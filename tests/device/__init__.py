"""A stand-in for CUDA and NCCL: the engine's paths for a device, on tensors of the CPU.

``standin.py`` runs an engine on several ranks, each a thread of one process, and writes down what each host would give
to its device. ``model.py`` plays what was written under the rules of CUDA and NCCL, and says exactly whether it ends.
``checker.py`` says whether every access to memory is ordered.
"""
