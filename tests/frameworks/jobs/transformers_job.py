"""Trains a tiny Llama sharded by FSDP2; save_pretrained and from_pretrained are transformers' own."""

import torch
import torch.distributed as dist
from job_settings import RANK, SETTINGS, WORLD, tell, watch_for_kill
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

dist.init_process_group("gloo")
base = SETTINGS.folder if SETTINGS.resume else f"{SETTINGS.folder}-begin"
if RANK == 0 and not SETTINGS.resume:
    torch.manual_seed(0)
    size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=4)).save_pretrained(base)
dist.barrier()
model = LlamaForCausalLM.from_pretrained(base, distributed_config=DistributedConfig(fsdp_size=WORLD))
model.train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(SETTINGS.steps):
    tokens = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(step)).chunk(WORLD)[RANK]
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
watch_for_kill()
model.save_pretrained(SETTINGS.folder, distributed_checkpoint=True)
tell(losses)
