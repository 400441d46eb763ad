"""Start workers as the pods of a Kubernetes cluster."""

from envfleet.launchers.kubernetes.settings import Kubernetes

__all__ = ["Kubernetes"]
