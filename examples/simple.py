"""Gradient compression on one page, in plain PyTorch: `torchrun --nproc-per-node 2 examples/simple.py`.

Read this program before the code of hvdcomp. It trains with top-k compression and error feedback, without hvdcomp. On
two ranks, its weights are bit for bit the same as with `hvdcomp.Compression(hvdcomp.TopK(ratio=0.01))`.
"""

import math

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

RATIO = 0.01  # the share of a gradient's elements that a rank sends in a step


def compress(x):
    """Returns the values and the indices of the k elements with the largest magnitudes, both of shape (k,)."""
    indices = x.abs().topk(math.ceil(RATIO * len(x))).indices
    return x[indices], indices


def exchange(values, indices):
    """Returns the values and indices of every rank, in rank order. All ranks send the same number of elements."""
    ranks = [(torch.empty_like(values), torch.empty_like(indices)) for _ in range(dist.get_world_size())]
    dist.all_gather([rank[0] for rank in ranks], values)
    dist.all_gather([rank[1] for rank in ranks], indices)
    return ranks


def decompress(values, indices, size):
    """Returns the vector (size,) that a rank sent: zero except at the indices."""
    return torch.zeros(size).index_copy(0, indices, values)


def mean_gradient(gradient, residual):
    """Returns the mean of the sent vectors. Updates the residual: the part that this rank has not sent yet."""
    x = gradient + residual  # error feedback: elements that earlier steps did not send may be sent now
    values, indices = compress(x)
    residual.copy_(x - decompress(values, indices, len(x)))
    ranks = exchange(values, indices)
    return sum(decompress(*rank, len(x)) / len(ranks) for rank in ranks)


def average_gradients(model, residuals):
    """Replaces the gradient of each parameter with the mean over the ranks. Compresses only large matrices."""
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.flatten()  # a view: changing it changes the parameter's gradient
        if parameter.ndim < 2 or len(gradient) < 1024:  # too small: compression would save nothing
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        else:
            residual = residuals.setdefault(name, torch.zeros_like(gradient))
            gradient.copy_(mean_gradient(gradient, residual))


def train(model, optimizer, average, steps=100):
    """Trains on this rank's part of the digits, and returns the last loss. `average` averages the gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    images, digits = (torch.from_numpy(array[rank::size]) for array in load_digits(return_X_y=True))
    for step in range(steps):
        batch = torch.arange(32 * step, 32 * step + 32) % len(digits)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[batch].float() / 16), digits[batch])
        loss.backward()
        average(model)
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # all ranks begin with the same weights
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    left = {}  # the residual of each parameter
    last = train(net, torch.optim.SGD(net.parameters(), 0.1, 0.9), lambda model: average_gradients(model, left))
    print(f"rank {dist.get_rank()}: loss {last:.3f}")
    dist.barrier()  # without it, a rank that ends before the others is sometimes killed by a signal
    dist.destroy_process_group()
