"""A small model and a step of it, with a fault in a layer: for the tests of `audit` and `trace`."""

import torch
from torch import nn


class Scaled(torch.autograd.Function):
    """Passes a tensor on and makes its gradient a little larger."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.0001


class Layer(nn.Module):
    """fault: what is done to the hidden units."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.fault = None

    def forward(self, x, *, scale=1.0):
        hidden = torch.relu(self.up(x))
        if self.fault is not None:
            hidden = self.fault(hidden)
        return x + scale * self.down(hidden)


class Model(nn.Module):
    """Three layers, and a dropout between the second and the third."""

    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.ModuleList([Layer(width) for _ in range(3)])
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x, scale=0.5)
            if i == 1:
                x = self.drop(x)
        return {"y": x, "layers": len(self.layers)}


def made(fault=None, layer=0, device="cpu"):
    """(model, optimizer, step), the same at every call but for the fault."""
    torch.manual_seed(0)
    model = Model().to(device)
    model.layers[layer].fault = fault
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(6, 4).to(device)

    def step():
        loss = model(x)["y"].square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step
