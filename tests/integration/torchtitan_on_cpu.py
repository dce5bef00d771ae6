"""torchtitan's own Trainer without a GPU, in the folder that it is started in: with its small Llama, with and
without offload. The last line that it prints names the modes whose weights have the bits of none.

torchtitan knows GPUs only. What it asks of one is answered here, attention, which is compiled for one, runs
as it is written, and triton, whose kernels are a GPU's, is a name while torchtitan is imported.
"""

import json
import os
import random
import sys
import types
from pathlib import Path

import torch

import offload

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
os.environ["TORCHDYNAMO_DISABLE"] = "1"
STEPS = 3


class Cpu(types.ModuleType):
    def __getattr__(self, name):
        memory = types.SimpleNamespace(total_memory=1 << 34)
        known = {
            "get_device_name": lambda *_: "cpu",
            "get_device_properties": lambda *_: memory,
            "memory_stats": lambda *_: {},
        }
        return getattr(torch.cpu, name, known.get(name, lambda *_, **__: None))


class Kernels(types.ModuleType):
    """Decorates kernels, which nothing here starts."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_, **__):
        return self

    def __getitem__(self, _):
        return self


def assets(folder: Path) -> None:
    words = ["<unk>", "<s>", "</s>", *(f"w{index}" for index in range(200))]
    tokenizer, draw = (
        Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, "<unk>")),
        random.Random(0),
    )
    tokenizer.pre_tokenizer = Whitespace()
    for name in ("tokenizer", "c4_test"):
        (folder / name).mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps(special))
    texts = [{"text": " ".join(draw.choices(words[3:], k=300))} for _ in range(200)]
    (folder / "c4_test/data.json").write_text("\n".join(map(json.dumps, texts)))


def config_of(folder: str):
    config = llama3_debugmodel()
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 64, STEPS
    config.training.disable_cuda_graphs, config.activation_checkpoint = True, None
    config.validator.enable, config.metrics.enable_tensorboard = False, True
    config.dump_folder, config.debug.seed = folder, 0
    return config


def trained(config) -> dict[str, torch.Tensor]:
    trainer = config.build()
    trainer.train()
    state = trainer.model_parts[0].state_dict()
    trainer.close()
    torch.distributed.destroy_process_group()
    return {name: getattr(one, "to_local", lambda one=one: one)().clone() for name, one in state.items()}


def refused(arguments: dict, change) -> None:
    config = config_of("refused")
    change(config)
    try:
        offloaded(config, **arguments)
    except ValueError:
        return
    raise AssertionError(arguments)


if __name__ == "__main__":
    import torch._functorch.partitioners  # which finds that there is no triton, before there is a name
    import torch._inductor.standalone_compile
    import torch.nn.attention.flex_attention as flex

    names = ("triton", "triton.language")
    sys.modules.update((name, Kernels(name)) for name in names)
    import torchtitan.tools.utils as tools
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tools.device_type, tools.device_module = "cpu", Cpu("cpu")
    flex._validate_device = lambda *_: None
    import torchtitan.distributed.utils as ranks
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from offload.integrations.torchtitan import offloaded

    for name in names:
        del sys.modules[name]
    FlexAttention._compiled_flex_attn = staticmethod(flex.flex_attention)
    ranks.set_pg_timeouts = lambda *_, **__: None
    assets(Path("tests/assets"))

    def ac(config):
        config.activation_checkpoint = FullAC.Config()

    refused({"mode": "auto"}, ac)
    refused({}, lambda config: setattr(config.training, "disable_cuda_graphs", False))
    refused({}, lambda config: setattr(config.parallelism, "pipeline_parallel_degree", 2))
    refused({}, lambda config: setattr(config.compile, "enable", True))
    refused({"keys": {"enable_activation_offload": True}, "mode": "groups"}, lambda config: None)
    plain, equal = trained(config_of("plain")), []
    for mode in ("groups", "hidden_states", True):
        offload.PipelineOffloadManager.close_instance()
        found = trained(offloaded(config_of(f"ours {mode}"), mode=mode, min_numel=1))
        if all(torch.equal(found[name], wanted) for name, wanted in plain.items()):
            equal.append(str(mode))
        (event,) = Path(f"ours {mode}").rglob("events.*")
        scalars = EventAccumulator(str(event)).Reload().Scalars("offload/to_host_bytes")
        assert [one.step for one in scalars] == [*range(1, STEPS + 1)], scalars
        assert sum(one.value for one in scalars) == offload.report().total.moved_bytes > 0
    sys.stdout.write(f"equal: {', '.join(equal)}\n")
