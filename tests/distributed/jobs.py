"""A rank of a process group: what is named on the command line, one after the other."""

import learning
import masking
import parting
import replicas
import sharding
from processes import work

if __name__ == "__main__":
    work({**vars(replicas), **vars(sharding), **vars(learning), **vars(masking), **vars(parting)})
