"""`python -m experiments.rollout --proof`, or without it the training."""

import argparse
import os
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.rollout", description=__doc__)
    parser.add_argument("--proof", action="store_true", help="compare the log-probabilities of samplers and trainers")
    parser.add_argument("--texts", type=int, help="of the proof")
    parser.add_argument("--rows", type=Path, default=Path("out/rollout.jsonl"), help="rows of the training, continued")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=200)
    args = parser.parse_args()
    # before JAX starts, because it reads the flag once
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    if args.proof:
        import dataclasses

        from experiments.rollout import proof
        from qjax.contrib.lab.machine import made_on

        size = proof.Size() if args.texts is None else dataclasses.replace(proof.Size(), texts=args.texts)
        found = []
        for row in proof.rows(size):
            found.append(row)
            print(f"{row.kind}; {row.form}: {row.differ:,} of {row.tokens:,} differ", flush=True)
        print(f"\n{proof.table(found)}\n\n{made_on()}")
        raise SystemExit(any(row.differ for row in found if row.kind == "exact"))


if __name__ == "__main__":
    main()
