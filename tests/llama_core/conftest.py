"""One thread: the models are tiny, and waiting threads are slow beside any other load."""

import torch

torch.set_num_threads(1)
