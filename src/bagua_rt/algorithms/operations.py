"""Operations that algorithms compose: each queues its work on one lane and returns at once."""

from __future__ import annotations

import torch

from bagua_rt.backend import Communicator, Kernels, Stream
from bagua_rt.errors import InternalError
from bagua_rt.process_group import Communicators


def all_reduce_sum_(flat: torch.Tensor, comm: Communicator, stream: Stream) -> None:
    """Sum `flat` over all ranks, in place.

    **Shapes:** any; equal on all ranks. **Stream:** queued on `stream`.
    """
    comm.all_reduce_(flat, "sum", stream=stream)


def hierarchical_sum_(flat: torch.Tensor, communicators: Communicators, stream: Stream) -> None:
    """Sum `flat` over all ranks, in place: within each node, among the leaders, and back.

    With scaled input (1/world_size) the result is the mean over *ranks*, for nodes of any sizes.

    **Shapes:** any; equal on all ranks. **Stream:** queued on `stream`.
    """
    node, leaders = communicators.intra_node, communicators.inter_node
    if node is None:
        raise InternalError(
            "the attachment has no intra-node communicator",
            fix="give the algorithm a field `hierarchical` that is true",
        )
    node.reduce_(flat, 0, "sum", stream=stream)
    if leaders is not None:
        leaders.all_reduce_(flat, "sum", stream=stream)
    node.broadcast_(flat, 0, stream=stream)


class SignCompression:
    """Mean over ranks by sign compression with error feedback, in two phases.

    Rank r owns chunk r of the buffer. Phase 1: every rank compresses its buffer (worker error), and sends
    each owner its chunk. Phase 2: the owner averages, compresses the average (server error), and sends it
    to all. Every rank decodes the same bytes, so all end with the same bits.

    Bytes each way and rank: ``(n-1) * (chunk/8 + 8)`` per phase, n ranks, chunk = numel/n elements.

    Args:
        flat: The buffer; a multiple of ``8 * n`` elements.
        numel: Its elements that are not padding.
        comm: The ranks.

    **Source:** Tang et al. 2021, "1-bit Adam", algorithm 1.
    """

    def __init__(self, flat: torch.Tensor, numel: int, comm: Communicator) -> None:
        n = comm.world_size
        chunk = flat.numel() // n
        self._rows = flat.view(n, chunk)
        self._numel = numel
        self._first_owned = comm.rank * chunk
        self._owned = torch.zeros(chunk, dtype=flat.dtype, device=flat.device)
        self._sent = torch.zeros(n, 8 + chunk // 8, dtype=torch.uint8, device=flat.device)
        self._received = torch.zeros_like(self._sent)
        self._answer = torch.zeros_like(self._sent[0])
        error_dtype = torch.promote_types(flat.dtype, torch.float32)
        self.worker_error = torch.zeros(n, chunk, dtype=error_dtype, device=flat.device)
        self.server_error = torch.zeros(1, chunk, dtype=error_dtype, device=flat.device)

    def mean_(self, comm: Communicator, kernels: Kernels, stream: Stream) -> None:
        """Replace the buffer by the compressed mean over all ranks.

        **Stream:** queued on `stream`.
        """
        kernels.sign_encode(self._rows, self.worker_error, self._numel, 0, self._sent, stream)
        comm.all_to_all(self._received, self._sent, stream=stream)
        kernels.sign_decode_mean(self._received, self._owned, stream)
        owned, answer = self._owned.unsqueeze(0), self._answer.unsqueeze(0)
        kernels.sign_encode(owned, self.server_error, self._numel, self._first_owned, answer, stream)
        comm.all_gather(self._received, self._answer, stream=stream)
        kernels.sign_decode(self._received, self._rows, stream)

    def reset(self) -> None:
        """Forget both errors."""
        self.worker_error.zero_()
        self.server_error.zero_()
