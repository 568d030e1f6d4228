"""A private classifier of handwritten digits: ordinary PyTorch, and five lines."""

import torch
from torch import nn

import quietgrad as qg
from quietgrad import data

digits = data.load("digits")
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=2.7)

plan = qg.dp_sgd(examples=digits.examples, batch_size=384, epochs=30).calibrate(epsilon=3.0, delta=1e-5)
plan = qg.dplis(plan)  # gradients of a smoothed loss
run = plan.start(model, optimizer, loss=qg.losses.CrossEntropy())
for batch in run.batches(digits.train):
    run.step(batch)
print(run.certificate())

x, y = digits.test
print(f"accuracy {(model(x).argmax(1) == y).float().mean():.1%} on held-out digits, which are public")
