"""Policy ``hgca`` on the GPU, without SGLang, compared with the torch policy, with and without a worker."""

from __future__ import annotations

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE
from test_gpu_scout import HEADS, LAYERS, LENGTHS, MAX_BLOCKS, SCALE, Decoding

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.core import DecodeBatch, LayerCache
from sglang_hybrid.engines.cuda.hgca import DeviceHgca, HgcaSettings
from sglang_hybrid.engines.cuda.layers import DeviceLayer
from sglang_hybrid.engines.cuda.program import ProgramContext
from sglang_hybrid.engines.cuda.watch import RatioWatch
from sglang_hybrid.memory.prompt_queries import PromptQueries
from sglang_hybrid.ops.cpu.structs import MASKS, Geometry
from sglang_hybrid.ops.cuda.mailbox import DeviceMailboxClient
from sglang_hybrid.policies.hgca.options import HgcaOptions
from sglang_hybrid.policies.hgca.policy import HgcaPolicy
from sglang_hybrid.policies.scout.tuning import tuning_of
from sglang_hybrid.protocol.mailbox import Mailbox
from sglang_hybrid.worker.torch_attention import TorchMisses

ON_GPU = DEVICE == "cuda"
STEPS = 70 if ON_GPU else 3  # on a GPU every row opens two blocks; here the third row opens one in its second step
OPTIONS = HgcaOptions(window_tokens=3 * BLOCK_TOKENS, alpha=0.3, beta=1.0)


class HgcaDecoding(Decoding):
    """``Decoding`` with the same prompts, the CUDA program of policy ``hgca``, and the torch policy."""

    def __init__(self, options: HgcaOptions = OPTIONS, worker: bool = False) -> None:
        self.options, self._worker = options, worker
        super().__init__(budget=MAX_BLOCKS, interval=0)
        self.lengths[2] = 3 * BLOCK_TOKENS - 1
        self.prompts = PromptQueries(max(LENGTHS) + 1)
        self.policy = HgcaPolicy(options, TorchMisses(), self.prompts)

    def program(self, layers: list[DeviceLayer], *_of_scout: object) -> DeviceHgca:
        client = None
        if self._worker:
            fields = {name: getattr(self.geometry, name) for name, _ in Geometry._fields_}
            self.geometry = Geometry(**(fields | {"flags": MASKS}))
            self.mailbox = Mailbox(self.geometry)
            client = DeviceMailboxClient(self.geometry, DEVICE)
            client.attach(self.mailbox)
        config = HybridConfig(policy="hgca", worker_deadline_ms=2000).with_section(self.options)
        return DeviceHgca(layers, self.shape, HgcaSettings.of(config), client)

    def load_initial_blocks(self) -> None:
        super().load_initial_blocks()
        torch.cuda.synchronize()
        for layer, kept in enumerate(self._settled[-LAYERS:]):
            assert isinstance(kept, tuple)
            self.prompts.store(layer, self.rows.cpu(), kept[1].cpu().float())  # kept: step and query

    def batch(self) -> DecodeBatch:
        lengths, rows = self.lengths.tolist(), self.rows.tolist()
        return DecodeBatch(self.pages, self.lengths.clone(), lengths, self.rows.cpu(), rows)

    def expected_of_policy(self) -> list[torch.Tensor]:
        """Return the torch policy's outputs for this step, one for each layer. The step's tokens are in the pool."""
        batch = self.batch()
        self.policy.begin_step(batch)
        outputs = []
        for layer in range(LAYERS):
            cache = LayerCache(self.keys[layer].float(), self.values[layer].float(), torch.empty(0), layer)
            outputs.append(self.policy.decode(self.query[layer, :-1].cpu().float(), cache, batch, SCALE))
        return outputs

    def check(self) -> None:
        torch.cuda.synchronize()
        self.check_slots()
        for layer, expected in enumerate(self.expected_of_policy()):
            found = self.out[layer, :-1].cpu().float()
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
            self.check_state(layer)
        assert int(self.scout.refused) == 0

    def check_state(self, layer: int) -> None:
        """Assert that averages and contextual sets equal the torch policy's, up to the precision of the products."""
        window, state = self.scout.windows[layer], self.policy._layers[layer]
        for row, length in zip(self.rows.tolist(), self.lengths.tolist(), strict=True):
            count = -(-length // BLOCK_TOKENS)
            slots = window.positions.shape[2]
            first = max(0, count - slots)
            at = self.policy._rows._rows[row].entry
            for position in range(first, count):
                slot, fill = position % slots, min(BLOCK_TOKENS, length - position * BLOCK_TOKENS)
                found = window.maw[row, :, slot, :fill].cpu()
                torch.testing.assert_close(found, state.maw[at, :, slot, :fill], rtol=2e-2, atol=1e-4)
            bits = torch.arange(BLOCK_TOKENS)
            found = window.masks[row, :, :first].cpu()[..., None] >> bits & 1
            expected = state.masks[at, :, :first][..., None] >> bits & 1
            # bfloat16 products are summed in another order, so a token at the threshold may be on the other side
            assert int((found != expected).sum()) <= first * HEADS * BLOCK_TOKENS // 100


def launch_or_record(decoding: HgcaDecoding, recorded: bool) -> torch.cuda.CUDAGraph | None:
    if not recorded:
        return None
    decoding.scout.step.load_nothing()
    decoding.run(predicts=False)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoding.run(predicts=False)
    return graph


@pytest.mark.parametrize("recorded", [False, True] if ON_GPU else [False])
@pytest.mark.parametrize("prefilled", [True, False], ids=["prefilled", "arrived"])
@pytest.mark.parametrize("worker", [True, False], ids=["worker", "no worker"])
def test_decoding_is_the_torch_policys(worker: bool, prefilled: bool, recorded: bool) -> None:
    decoding = HgcaDecoding(worker=worker)
    with decoding.engine():
        if prefilled:
            decoding.load_initial_blocks()
        else:
            decoding.scout.reset_rows(decoding.rows)
        graph = launch_or_record(decoding, recorded)
        for _ in range(STEPS):
            decoding.next_tokens()
            if graph:
                graph.replay()
            else:
                decoding.run(predicts=False)
            decoding.check()
    assert int(decoding.scout.counted.sum()) > 0


EXACT = [HgcaOptions(window_tokens=1280), HgcaOptions(window_tokens=128, beta=0.0)]


@pytest.mark.parametrize("options", EXACT, ids=["a large window", "beta 0"])
def test_a_window_above_the_context_or_a_beta_of_0_is_exact(options: HgcaOptions) -> None:
    decoding = HgcaDecoding(options, worker=True)
    with decoding.engine():
        decoding.load_initial_blocks()
        for _ in range(STEPS // 2):
            decoding.next_tokens()
            decoding.run(predicts=False)
            torch.cuda.synchronize()
            for layer in range(LAYERS):
                expected = decoding.expected(layer, everything=True)
                found = decoding.out[layer, :-1].cpu().float()
                torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_rows_move_to_whole_requests_and_back() -> None:
    decoding = HgcaDecoding(HgcaOptions(window_tokens=256))  # memory for 72 blocks, of which 64 are needed
    decoding.scout.reset_rows(decoding.rows)
    for whole in (True, False, True, False):
        decoding.scout.hold_rows(whole, count=decoding.query.shape[1])
        decoding.policy.reset_rows(decoding.rows.tolist())
        for _ in range(2):
            decoding.next_tokens()
            if whole:
                decoding.scout.dense.begin_step(decoding.query.shape[1], decoding.lengths.tolist())
            decoding.run(predicts=False)
            if not whole:
                decoding.check()
                continue
            torch.cuda.synchronize()
            for layer in range(LAYERS):
                found = decoding.out[layer, :-1].cpu().float()
                torch.testing.assert_close(found, decoding.expected(layer, everything=True), rtol=2e-2, atol=2e-2)


@pytest.mark.device  # needs pinned memory
def test_ratios_are_watched() -> None:
    decoding = HgcaDecoding(worker=True)
    config = HybridConfig(policy="hgca").with_section(OPTIONS)
    context = ProgramContext([], decoding.shape, config, tuning_of(config, LAYERS), False, False)
    assert isinstance(decoding.scout.new_watch(context), RatioWatch)


def test_the_tokens_of_the_window_need_no_worker() -> None:
    assert HgcaDecoding().scout.near_tokens(HybridConfig(policy="hgca")) == OPTIONS.window_tokens
