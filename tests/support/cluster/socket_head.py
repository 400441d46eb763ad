"""The head's socket in a process of its own. `python -m tests.support.cluster.socket_head SILENCE_S NUM_DESCRIPTORS`"""

import json
import resource
import sys

from envfleet.cluster.head.socket import HeadSocket
from envfleet.cluster.wire.sockets import RunKeys


class Printing:
    """See Receiver."""

    def connected(self, process):
        pass

    def receive(self, process, frames):
        print(bytes(frames[0]).decode(), flush=True)

    def tick(self, now_s):
        pass


def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[2])))
    keys = RunKeys.make()
    head = HeadSocket("tcp://127.0.0.1:0", keys, float(sys.argv[1]), Printing())
    head.start()
    print(json.dumps([head.address, keys.for_workers()]), flush=True)
    sys.stdin.read()
    head.close()


if __name__ == "__main__":
    main()
