"""Start workers as the pods of a Kubernetes cluster."""
