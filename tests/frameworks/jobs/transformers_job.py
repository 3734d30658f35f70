"""Trains a tiny Llama sharded by FSDP2; save_pretrained and from_pretrained are transformers' own."""

import torch
import torch.distributed as dist
from job_settings import RANK, SETTINGS, WORLD, tell, watch_for_kill
from tiny_llama import make_llama, tokens_of
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.checkpoint import consolidate_distributed_checkpoint

dist.init_process_group("gloo")
base = SETTINGS.folder if SETTINGS.resume else f"{SETTINGS.folder}-begin"
if RANK == 0 and not SETTINGS.resume:
    make_llama().save_pretrained(base)
dist.barrier()
model = LlamaForCausalLM.from_pretrained(base, distributed_config=DistributedConfig(fsdp_size=WORLD))
model.train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(SETTINGS.steps):
    tokens = tokens_of(step).chunk(WORLD)[RANK]
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
watch_for_kill()
model.save_pretrained(SETTINGS.folder, distributed_checkpoint=True)
if SETTINGS.export and RANK == 0:
    consolidate_distributed_checkpoint(SETTINGS.folder, SETTINGS.export)
tell(losses)
