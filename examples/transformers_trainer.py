"""transformers' Trainer: a callback applies offload when training begins, and removes it at the end. What
moved in the last step stands in the logs, and so in TensorBoard, W&B and whatever else `report_to` names.

    python examples/transformers_trainer.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from offload.integrations.transformers import OffloadCallback


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
        callback = OffloadCallback(mode=mode, min_numel=10_000, device_limit="4MB").add_to(trainer)
        trainer.train()
        print(callback.handle.report())
    return trainer


if __name__ == "__main__":
    main()
