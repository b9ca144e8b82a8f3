"""One thread: the models are tiny, and threads that wait for each other lose to any other load on the machine."""

import torch

torch.set_num_threads(1)
