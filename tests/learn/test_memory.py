"""Peak memory by what operators take and return."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from overlap1f1b.learn.memory import peak_bytes

CPU, KIB = torch.device("cpu"), 1024


def test_the_most_at_once_counts_without_what_was_there() -> None:
    before = torch.ones(KIB)

    def step() -> None:
        a = before + 1  # 4 KiB
        b = torch.cat([a, a])  # 8 KiB
        del a
        view = b[:10]
        del b
        view.add_(1)
        del view
        torch.ones(2 * KIB)

    assert peak_bytes(CPU, step) == 12 * KIB
    assert peak_bytes(CPU, lambda: before.mul_(1)) == 0


def test_what_a_graph_holds_counts_as_long_as_it_does() -> None:
    def step() -> None:
        x = torch.ones(KIB, requires_grad=True)  # 4 KiB
        y = x
        for _ in range(3):
            y = y.exp()  # each is saved
        (grad,) = torch.autograd.grad(y.sum(), x)
        del grad, y
        torch.ones(5 * KIB)

    assert 4 * 5 * KIB <= peak_bytes(CPU, step) < 4 * 7 * KIB


def test_other_threads_let_go_and_receive() -> None:
    box: list[Tensor] = []

    def step() -> None:
        with ThreadPoolExecutor(1) as pool:
            for _ in range(8):
                box.append(torch.ones(KIB))
                pool.submit(box.clear).result()
        thread = threading.Thread(target=lambda: box.append(torch.ones(2 * KIB)))
        thread.start()
        thread.join()
        box[0].add_(1)
        box.clear()

    assert peak_bytes(CPU, step) == 8 * KIB
