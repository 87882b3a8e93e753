"""A trainer with FSDP on several ranks that sends its weights to vLLM. Every rank offers its own shards.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --tensor-parallel-size 2 --weight-transfer-config '{"backend": "starling"}'
    torchrun --nproc-per-node 2 examples/vllm_fsdp.py MODEL http://localhost:8000 FOLDER

It prints what travelled for each version, and saves the last one in FOLDER.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoModelForCausalLM

from starling.weightsync.vllm.backend.clients import HttpEngines
from starling.weightsync.vllm.backend.sender import SenderOptions, WeightSender

if len(sys.argv) != 4:
    sys.exit(__doc__)
path, url, folder = sys.argv[1:]
dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engines = HttpEngines(url)
sender = WeightSender(model, engines, rank=dist.get_rank(), options=SenderOptions())
sender.join()
for _ in range(3):
    tokens = torch.randint(model.config.vocab_size, (4, 32))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with CommDebugMode() as collectives:
        sender.stage()  # vLLM generates meanwhile
        sender.switch(engines.paused())
    if dist.get_rank() == 0:
        sent = [report.bytes_by_source for report in sender.report.pulls.values()]
        print(f"version {sender.version}: {sent} bytes, collectives: {dict(collectives.get_comm_counts())}", flush=True)
full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:
    torch.save(full, f"{folder}/trained.pt")
sender.close()
dist.destroy_process_group()
