"""A transformers model in a loop of your own; each block is recomputed, and its input waits on the host.

python examples/transformers_model.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import offload


def main(steps: int = 3) -> None:
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
    model = LlamaForCausalLM(config).to(device)  # or from_pretrained(...)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    handle = offload.apply(model, mode="hidden_states", min_numel=10_000)
    print(handle)
    for step in range(steps):
        tokens = torch.randint(512, (2, 128), device=device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    print(handle.report())


if __name__ == "__main__":
    main()
