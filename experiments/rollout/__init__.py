"""A sampler and a trainer that agree in every bit: `python -m experiments.rollout`.

`decoder` is a byte decoder whose cache is written at a place of each example's own. `layouts` lays texts out for it, as
samplers and as trainers do. `proof` compares the log-probabilities of both, and `training` uses them for reinforcement
learning.
"""
