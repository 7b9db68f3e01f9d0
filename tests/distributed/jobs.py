"""A process that forks the ranks of process groups, each with jobs to do one after the other."""

import gathering
import learning
import masking
import parting
import replicas
import sharding
import torch
from processes import serve

import secateur as sec

if __name__ == "__main__":
    torch.set_num_threads(1)
    sec.trace(sharding.llama(), sharding.IDS)  # what torch and others do only once is done before the forks
    serve({**vars(replicas), **vars(sharding), **vars(learning), **vars(masking), **vars(parting), **vars(gathering)})
