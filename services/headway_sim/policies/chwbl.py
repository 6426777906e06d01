"""Consistent hashing with bounded loads, as KubeAI's PrefixHash strategy.

Source: github.com/substratusai/kubeai, internal/loadbalancer (balance_chwbl.go); Mirrokni, Thorup and Zadimoghaddam
2018. The key is the first 100 characters of the prompt: in a chat, of its first user message. Each endpoint has 256
places on a ring. From the key's place on, the first endpoint takes the request for which load ≤ (total + 1)/n · 1.25,
where, as in KubeAI's code, its load counts the new request too. An idle fleet: the first one, and also where nobody
is within the bound, which happens while there are few requests.

Choices: characters are bytes; token ids have four bytes each, so the key is 25 of them; of a prompt known by block
hashes the key is the first hash; a request without prompt has its id as key. The ring, built once for a set of
endpoints, is all its memory. KubeAI's later, optional routing key (a header) is not used.
"""

from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt
from headway_scheduler.domain.request import BlocksPrompt, Request, TextPrompt
from headway_scheduler.strategies.base import Costs, Parameters, SoftGuard
from headway_scheduler.strategies.view import View
from pydantic import Field
from xxhash import xxh3_64_intdigest

from headway_sim.policies.choice import only
from headway_sim.policies.turns import first_user_bytes

__all__ = ["Chwbl", "key_of", "ring_of"]

Hashes = npt.NDArray[np.uint64]
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


class ChwblParameters(Parameters):
    """What can be tuned."""

    load_factor: float = Field(1.25, ge=1.0, le=10.0, description="Load allowed over the mean")
    prefix_bytes: int = Field(100, ge=1, le=100_000, description="Bytes of the prompt in the key")
    virtual_nodes: int = Field(256, ge=1, le=4096, description="Places of each endpoint on the ring")


class Chwbl:
    """Cost: 0 for the first endpoint on the ring that is within the bound."""

    name: ClassVar[str] = "chwbl"
    parameters_type: ClassVar[type[Parameters]] = ChwblParameters
    classic: ClassVar[bool] = False
    guards: ClassVar[frozenset[SoftGuard]] = frozenset()

    def __init__(self, parameters: ChwblParameters) -> None:
        self.parameters = parameters
        self._built_for = b""
        self._places: Hashes = np.zeros(0, np.uint64)
        self._owners: npt.NDArray[np.intp] = np.zeros(0, np.intp)

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate."""
        self._build(view.ring)
        key = np.uint64(xxh3_64_intdigest(key_of(request, self.parameters.prefix_bytes)))
        start = int(self._places.searchsorted(key))
        load = view.inflight
        fits = load + 1.0 <= (load.sum() + 1.0) / len(view) * self.parameters.load_factor
        if not fits.any():  # as in an idle fleet of several
            return only(int(self._owners[start]), len(view))
        # The owners are there twice, so that a walk from any place, or from beyond the last, passes all of them.
        walk = self._owners[start : start + len(self._places)]
        return only(int(walk[fits[walk].argmax()]), len(view))

    def _build(self, ring: Hashes) -> None:
        endpoints = ring.tobytes()
        if endpoints != self._built_for:
            self._places, owners = ring_of(ring, self.parameters.virtual_nodes)
            self._owners = np.concatenate([owners, owners])
            self._built_for = endpoints


def ring_of(ring: Hashes, virtual_nodes: int) -> tuple[Hashes, npt.NDArray[np.intp]]:
    """The places on the ring in order, and which endpoint each belongs to (splitmix64 of its hash and a number)."""
    steps = np.arange(1, virtual_nodes + 1, dtype=np.uint64) * _GOLDEN
    mixed = (ring[:, None] + steps).ravel()
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    order = np.argsort(mixed, kind="stable")
    return mixed[order], order // virtual_nodes


def key_of(request: Request, prefix_bytes: int) -> bytes:
    """What is hashed: the beginning of the prompt."""
    prompt = request.prompt
    if prompt is None:
        return request.request_id.encode()
    if isinstance(prompt, BlocksPrompt):
        return repr(prompt.hashes[:1]).encode()
    if isinstance(prompt, TextPrompt):
        return first_user_bytes(prompt.data, prefix_bytes)
    return prompt.data[:prefix_bytes]
