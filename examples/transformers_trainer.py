"""transformers' Trainer: a callback applies offload when training begins, and removes it at the end. What
moved stands in the logs.

    python examples/transformers_trainer.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import offload


class OffloadCallback(TrainerCallback):
    """`arguments` are those of `offload.apply`."""

    def __init__(self, **arguments):
        self.arguments = arguments

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.handle = offload.apply(model, **self.arguments)

    def on_log(self, args, state, control, logs=None, **kwargs):
        figures = self.handle.report().as_dict()
        for name in ("moved_bytes", "peak_bytes", "stall_ms"):
            logs[f"offload/{name}"] = state.log_history[-1][f"offload/{name}"] = figures[name]

    def on_train_end(self, args, state, control, **kwargs):
        print(self.handle.report())
        self.handle.remove()


def main(mode="groups", steps: int = 3) -> Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    rows = torch.randint(512, (16, 128))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=LlamaForCausalLM(config),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[OffloadCallback(mode=mode, min_numel=10_000)],
        )
        trainer.train()
    return trainer


if __name__ == "__main__":
    main()
