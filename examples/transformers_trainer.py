"""transformers' Trainer: a callback applies offload when training begins, and removes it at the end. What
moved in the last step stands in the logs, and so in TensorBoard, W&B and whatever else `report_to` names.

    python examples/transformers_trainer.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import offload

FIGURES = ("moved_bytes", "peak_bytes", "stall_ms")


class OffloadCallback(TrainerCallback):
    """`arguments` are those of `offload.apply`. Use `add_to`: what a Trainer is given as `callbacks` comes
    after its reporters, which have written a log before a later callback can add to it."""

    def __init__(self, **arguments):
        self.arguments = arguments
        self.handle = None

    def add_to(self, trainer):
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.handle = offload.apply(model, **self.arguments)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.handle is None:  # an evaluation before any training
            return
        step = self.handle.report().last_step  # {} before a step has ended; totals are in as_dict()
        figures = {f"offload/last_step_{name}": step[name] for name in FIGURES if name in step}
        logs.update(figures)
        state.log_history[-1].update(figures)

    def on_train_end(self, args, state, control, **kwargs):
        print(self.handle.report())
        self.handle.remove()


def main(mode="groups", steps: int = 3, report_to="none") -> Trainer:
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
                report_to=report_to,
                use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        )
        OffloadCallback(mode=mode, min_numel=10_000, device_limit="4MB").add_to(trainer)
        trainer.train()
    return trainer


if __name__ == "__main__":
    main()
