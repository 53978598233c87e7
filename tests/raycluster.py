# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster on this machine: a head without CPUs, and two nodes with one CPU each. Run it with a Python that has
Ray.

It prints its address, and stops when its standard input is closed.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

OBJECTS_BYTES = 100 << 20


def main() -> None:
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": OBJECTS_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=OBJECTS_BYTES)
        cluster.wait_for_nodes()
        print(f"address {cluster.address}", flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
