"""Reinforcement learning whose sampler and trainer agree; with --proof and --costs, what that is worth and costs."""

import argparse
import os
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.rollout", description=__doc__)
    parser.add_argument("--proof", action="store_true", help="compare the log-probabilities of samplers and trainers")
    parser.add_argument("--costs", action="store_true", help="measure tokens per second and training steps")
    parser.add_argument("--texts", type=int, help="of the proof")
    parser.add_argument("--rows", type=Path, default=Path("out/rollout.jsonl"), help="rows of the training, continued")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=100)
    args = parser.parse_args()
    # before JAX starts, because it reads the flag once; one device is what the costs are measured on
    if args.proof:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    import dataclasses

    from qjax.contrib.lab.machine import made_on

    if args.proof:
        from experiments.rollout import proof

        size = proof.Size() if args.texts is None else dataclasses.replace(proof.Size(), texts=args.texts)
        found = []
        for row in proof.rows(size):
            found.append(row)
            print(f"{row.kind}; {row.form}: {row.differ:,} of {row.tokens:,} differ", flush=True)
        print(f"\n{proof.table(found)}\n\n{made_on()}")
        raise SystemExit(any(row.differ for row in found if row.kind == "exact"))
    if args.costs:
        from experiments.rollout import costs, proof

        size = proof.Size()
        print(f"{costs.table(costs.measured(size), size)}\n\n{made_on()}")
        return
    from experiments.rollout import training

    made = training.rows(dataclasses.replace(training.Setting(), updates=args.updates), args.seeds, args.rows)
    print(f"\n{training.table(made)}\n\n{made_on()}")


if __name__ == "__main__":
    main()
