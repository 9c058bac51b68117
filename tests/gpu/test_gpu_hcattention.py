"""Policy ``hcattention`` on the GPU, without SGLang, compared with the torch policy, with and without a worker."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, seeded
from selection_cases import later
from test_gpu_hgca import launch_or_record
from test_gpu_scout import DIM, DTYPE, GROUP, HEADS, LAYERS, MAX_BLOCKS, PAGES, SCALE, Decoding

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.core import DecodeBatch, LayerCache
from sglang_hybrid.engines.cuda.hcattention import DeviceHCAttention, HCAttentionSettings, codes_of_layer
from sglang_hybrid.engines.cuda.layers import DeviceLayer
from sglang_hybrid.engines.cuda.program import ProgramContext
from sglang_hybrid.engines.cuda.watch import RatioWatch
from sglang_hybrid.memory.key_codes import KeyCodes
from sglang_hybrid.ops.cpu.library import mailbox_fields
from sglang_hybrid.ops.cpu.structs import VALUE_SUMS, Geometry
from sglang_hybrid.ops.cuda.digests import LayerDigests
from sglang_hybrid.ops.cuda.kept_tokens import SHARE_UNITS
from sglang_hybrid.ops.cuda.mailbox import DeviceMailboxClient
from sglang_hybrid.policies.hcattention.codebooks import QuantisedKeys
from sglang_hybrid.policies.hcattention.options import HCAttentionOptions
from sglang_hybrid.policies.hcattention.policy import HCAttention
from sglang_hybrid.policies.registry import PolicyError
from sglang_hybrid.policies.scout.tuning import tuning_of
from sglang_hybrid.protocol.mailbox import Mailbox
from sglang_hybrid.worker.torch_attention import TorchMisses

ON_GPU = DEVICE == "cuda"
STEPS = 70 if ON_GPU else 2  # on a GPU every row opens two blocks; here the third row opens one in its first step
GROUPS, CENTROIDS = 16, 40
PATIENCE_S = 20.0  # long, because the worker shares its cores with other tests


class HCAttentionDecoding(Decoding):
    """``Decoding`` with the same prompts, the CUDA program of policy ``hcattention``, and the torch policy."""

    def __init__(
        self, options: HCAttentionOptions | None = None, worker: bool = False, quantised: bool = False,
        longest_list: int = MAX_BLOCKS,
    ) -> None:  # fmt: skip
        self.options, self._worker = options or HCAttentionOptions(tau=0.8), worker
        self._quantised, self._longest_list = quantised, longest_list
        self.ratios: list[float] = []
        super().__init__(budget=longest_list, interval=0)

    def program(self, layers: list[DeviceLayer], *_of_scout: object) -> DeviceHCAttention:
        self._encode()
        self._settled.append(layers)  # keeps digests alive, which may not be written yet
        layers = [
            replace(
                layer,
                digests=LayerDigests.none(layer.pool.keys, DEVICE),
                codes=codes_of_layer(self.codes.of_layer(number), self.quantised, number, DTYPE, DIM),
            )
            for number, layer in enumerate(layers)
        ]
        for number, layer in enumerate(layers):
            every = torch.arange(PAGES, dtype=torch.int32, device=DEVICE)
            if self.quantised is not None:  # the same codes as by the kernels, but in less time
                self.codes.refresh(number, self.keys[number], every.long())
                continue
            full, on_device = torch.full_like(every, BLOCK_TOKENS), self.keys[number].to(DEVICE)
            self._settled.append((every, full, on_device))
            layer.summarise(on_device, every, full)
        client = None
        if self._worker:
            fields = {name: getattr(self.geometry, name) for name, _ in Geometry._fields_}
            self.geometry = Geometry(**(fields | {"flags": VALUE_SUMS}))
            self.mailbox = Mailbox(self.geometry)
            client = DeviceMailboxClient(self.geometry, DEVICE)
            client.attach(self.mailbox)
        self.client = client
        settings = HCAttentionSettings.of(HybridConfig(policy="hcattention").with_section(self.options))
        return DeviceHCAttention(layers, self.shape, replace(settings, deadline_s=PATIENCE_S), client)

    def _encode(self) -> None:
        """Allocate codes and, with quantised keys, draw random codebooks."""
        self.quantised: QuantisedKeys | None = None
        if self._quantised:
            size = (HEADS, GROUPS, CENTROIDS, DIM // GROUPS)
            books = [(4 * torch.randn(size, generator=seeded(layer))).round() / 4 for layer in range(LAYERS)]
            self.quantised = QuantisedKeys([book.to(DEVICE) for book in books], GROUPS, 1)
        code_bytes = GROUPS if self._quantised else DIM * DTYPE.itemsize
        self.codes = KeyCodes(code_bytes, LAYERS, PAGES, HEADS, BLOCK_TOKENS, DEVICE)
        if self.quantised is not None:
            self.codes.use(self.quantised)

    def batch(self) -> DecodeBatch:
        lengths, rows = self.lengths.tolist(), self.rows.tolist()
        return DecodeBatch(self.pages, self.lengths.clone(), lengths, self.rows.cpu(), rows)

    def expected_of_policy(self, layer: int) -> torch.Tensor:
        """Return the torch policy's output, by the codes that the GPU wrote. The step's tokens are in the pool."""
        keys = None
        if self.quantised is not None:
            keys = QuantisedKeys([self.quantised.codebooks(number).cpu() for number in range(LAYERS)], GROUPS, 1)
        policy = HCAttention(self.options, TorchMisses(), keys)
        policy.on_ratio = lambda _layer, ratio: self.ratios.append(ratio)
        codes = self.codes.of_layer(layer).cpu()
        cache = LayerCache(self.keys[layer], self.values[layer].float(), torch.empty(0), layer, codes=codes)
        return policy.decode(self.query[layer, :-1].cpu().float(), cache, self.batch(), SCALE)

    def check(self) -> None:
        torch.cuda.synchronize()
        for layer in range(LAYERS):
            self.check_codes(layer)
            found = self.out[layer, :-1].cpu().float()
            torch.testing.assert_close(found, self.expected_of_policy(layer), rtol=2e-2, atol=2e-2)
        assert int(self.scout.refused) == 0

    def check_codes(self, layer: int) -> None:
        """Assert that the codes of the step's tokens are those of their keys in the pool."""
        tail = (self.lengths - 1) // BLOCK_TOKENS
        pages, offsets = self.pages[torch.arange(len(tail)), tail], (self.lengths - 1) % BLOCK_TOKENS
        keys = self.keys[layer][pages, :, offsets]
        assert torch.equal(keys, self.new_keys[layer, :-1].cpu())
        codes = self.codes.of_layer(layer)[pages.to(DEVICE), :, offsets.to(DEVICE)].cpu()
        if self.quantised is None:
            assert torch.equal(codes.view(DTYPE), keys)
            return
        expected = self.quantised.encode(layer, keys.unsqueeze(2).to(DEVICE)).squeeze(2).cpu()
        assert (codes == expected).float().mean() > 0.9  # some centroids are equally near

    def outcomes(self) -> dict[str, int]:
        assert self.client is not None
        return self.client.outcomes()


def steps_of(decoding: HCAttentionDecoding, recorded: bool = False) -> None:
    decoding.scout.reset_rows(decoding.rows)
    graph = launch_or_record(decoding, recorded)  # type: ignore[arg-type]
    for _ in range(STEPS):
        decoding.next_tokens()
        if graph:
            graph.replay()
        else:
            decoding.run(predicts=False)
        decoding.check()


@pytest.mark.parametrize("recorded", [False, True] if ON_GPU else [False])
@pytest.mark.parametrize("quantised", [False, True], ids=["whole keys", "quantised keys"])
@pytest.mark.parametrize("worker", [True, False], ids=["worker", "no worker"])
def test_decoding_is_the_torch_policys(worker: bool, quantised: bool, recorded: bool) -> None:
    decoding = HCAttentionDecoding(worker=worker, quantised=quantised)
    with decoding.engine():
        steps_of(decoding, recorded)
    if worker:
        assert decoding.outcomes()["served"] == STEPS * LAYERS * len(decoding.lengths)
    counted = decoding.scout.counted.sum() / (SHARE_UNITS * HEADS * GROUP)
    assert abs(float(counted) - len(decoding.lengths) * sum(decoding.ratios)) < 0.02 * STEPS * LAYERS


@pytest.mark.parametrize("renormalise", [True, False])
def test_whole_keys_and_all_of_the_mass_are_full_attention(renormalise: bool) -> None:
    decoding = HCAttentionDecoding(HCAttentionOptions(tau=1.0, renormalise=renormalise), worker=True)
    with decoding.engine():
        steps_of(decoding)
        for layer in range(LAYERS):
            found = decoding.out[layer, :-1].cpu().float()
            torch.testing.assert_close(found, decoding.expected(layer, everything=True), rtol=2e-2, atol=2e-2)


def test_a_list_longer_than_the_mailbox_holds_is_summed_by_the_gpu() -> None:
    decoding = HCAttentionDecoding(HCAttentionOptions(tau=1.0), worker=True, longest_list=10)
    with decoding.engine():
        steps_of(decoding)
    long = int((decoding.lengths > 10 * BLOCK_TOKENS).sum())
    assert long == 2  # the other two of the four rows are shorter
    outcomes = decoding.outcomes()
    assert (outcomes["refused"], outcomes["served"]) == (STEPS * LAYERS * 2,) * 2


def test_a_worker_that_never_answers_costs_one_wait_and_no_accuracy() -> None:
    decoding = HCAttentionDecoding(worker=True)
    decoding.scout._settings = replace(decoding.scout._settings, deadline_s=0.001)
    steps_of(decoding)  # no worker engine runs
    outcomes, rows = decoding.outcomes(), len(decoding.lengths)
    # the second layer is posted before the first is known to be late, and is not waited for
    assert (outcomes["served"], outcomes["late"]) == (0, 2 * rows)
    assert outcomes["withheld"] == (STEPS * LAYERS - 2) * rows


def test_a_reply_that_does_not_match_is_dropped() -> None:
    """As soon as a layer is posted, replies of another generation are written to the mailbox."""
    decoding = HCAttentionDecoding(worker=True)
    client, mailbox = decoding.client, decoding.mailbox
    assert client is not None and mailbox is not None
    wait = client.wait

    def write_replies() -> None:
        state = client.read_state()
        first = state.sequence % 2 * decoding.geometry.rows
        for row in range(len(decoding.lengths)):
            for name, value in (("generation", state.generation + 1), ("sequence", state.sequence)):
                offset, size = mailbox_fields()["Reply"][name]
                _, stride = mailbox_fields()["Reply"][""]
                place = mailbox.region.address + mailbox.layout.replies + (first + row) * stride + offset
                (ctypes.c_uint64 if size == 8 else ctypes.c_uint32).from_address(place).value = value

    def damaged_wait(*arguments: Any) -> None:
        later(write_replies)
        wait(*arguments)

    client.wait = damaged_wait  # type: ignore[method-assign, assignment]
    steps_of(decoding)
    assert decoding.outcomes()["damaged"] == STEPS * LAYERS * len(decoding.lengths)


def test_a_pool_without_codes_is_refused() -> None:
    decoding = HCAttentionDecoding()
    layers = [replace(layer, codes=None) for layer in decoding.scout._layers]
    with pytest.raises(PolicyError, match="start with policy=hcattention"):
        DeviceHCAttention(layers, decoding.shape, decoding.scout._settings, None)


def test_every_token_may_need_the_worker_and_no_row_is_held() -> None:
    decoding = HCAttentionDecoding()
    assert decoding.scout.near_tokens(HybridConfig(policy="hcattention")) == 0
    assert decoding.scout.dense.pages == 0


@pytest.mark.device  # needs pinned memory
def test_ratios_are_watched() -> None:
    decoding = HCAttentionDecoding(worker=True)
    config = HybridConfig(policy="hcattention")
    context = ProgramContext([], decoding.shape, config, tuning_of(config, LAYERS), False, False)
    assert isinstance(decoding.scout.new_watch(context), RatioWatch)
