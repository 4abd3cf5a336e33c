"""A click model on synthetic ids: `torchrun --nproc-per-node 2 examples/embeddings.py`.

The model is a small DLRM (Naumov et al. 2019, arXiv:1906.00091). `RowExchange` exchanges the gradients of the tables
row by row. DistributedDataParallel exchanges the gradients of the layers, which hvdcomp compresses.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvdcomp

TABLES, ROWS, COLUMNS, BATCH = 4, 50_000, 16, 128


class ClickModel(torch.nn.Module):
    """Computes the products of all pairs among one row per table and the vector of the dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(ROWS, COLUMNS, sparse=True) for _ in range(TABLES))
        self.bottom = torch.nn.Sequential(torch.nn.Linear(13, 64), torch.nn.ReLU(), torch.nn.Linear(64, COLUMNS))
        pairs = TABLES * (TABLES + 1) // 2
        self.top = torch.nn.Sequential(torch.nn.Linear(COLUMNS + pairs, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        below = self.bottom(dense)
        vectors = torch.stack([below, *(table(column) for table, column in zip(self.tables, ids.T, strict=True))], 1)
        first, second = torch.triu_indices(TABLES + 1, TABLES + 1, offset=1)
        products = (vectors @ vectors.mT)[:, first, second]
        return self.top(torch.cat([below, products], 1))[:, 0]


dist.init_process_group("gloo")
torch.manual_seed(0)  # the same tables on all ranks
model = ClickModel()
scores = torch.randn(TABLES, ROWS)  # the rule that the model must learn
rows = hvdcomp.torch.RowExchange(model)  # before DistributedDataParallel
ddp = DistributedDataParallel(model)
compression = hvdcomp.Compression(hvdcomp.TopK(ratio=0.1))
hvdcomp.ddp.register(ddp, compression)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

often = 1 / torch.arange(1, ROWS + 1).double() ** 1.3  # Zipf: 1 % of the rows get 90 % of the accesses
generator = torch.Generator().manual_seed(1 + dist.get_rank())  # each rank has its own data
for step in range(1, 201):
    dense = torch.randn(BATCH, 13, generator=generator)
    ids = torch.multinomial(often, TABLES * BATCH, replacement=True, generator=generator).view(BATCH, TABLES)
    clicks = (dense[:, 0] + scores[torch.arange(TABLES), ids].sum(1) > 0).float()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(ddp(dense, ids), clicks)
    optimizer.zero_grad()
    loss.backward()
    rows.exchange()
    optimizer.step()
    if step % 50 == 0 and dist.get_rank() == 0:
        factors = [compressed.ledger.totals.compression_factor for compressed in (rows, compression)]
        print(f"step {step}: loss {loss:.3f}; tables in {factors[0]:.0f}, layers in {factors[1]:.1f} times fewer bytes")
dist.barrier()  # without it, a rank that ends before the others is sometimes killed by a signal
dist.destroy_process_group()
