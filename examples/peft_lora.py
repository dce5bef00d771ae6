"""LoRA on a frozen model.

Only the adapters train, but the backward passes through every layer, so all of them save activations.
Recompute would compute every frozen layer twice; `mode=True` moves what they save instead.
`main(mode="hidden_states")` works as well: it takes less memory and more time, and says so.

    python examples/peft_lora.py
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import offload


def main(mode=True, steps: int = 3) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(LlamaForCausalLM(config).to(device), lora)
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)

    handle = offload.apply(model, mode=mode, min_numel=10_000, device_limit="3MB")
    print(handle)
    for step in range(steps):
        tokens = torch.randint(512, (2, 128), device=device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    print(handle.report())
    handle.remove()


if __name__ == "__main__":
    main()
