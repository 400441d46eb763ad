"""What ApiStandIn refuses of pods in a namespace: a quota that is used up, and PodSecurity's level "restricted"."""

LEVEL = "pod-security.kubernetes.io/enforce"  # label of a namespace


def quota_refusal(name, num_pods, quotas):
    for quota in quotas:
        limit = quota["spec"]["hard"].get("pods")
        if limit is not None and num_pods >= int(limit):
            return (
                f'pods "{name}" is forbidden: exceeded quota: {quota["metadata"]["name"]}, requested: pods=1, '
                f"used: pods={num_pods}, limited: pods={limit}"
            )
    return None


def security_refusal(name, spec, namespace):
    if namespace["metadata"].get("labels", {}).get(LEVEL) != "restricted":
        return None
    faults = [fault for container in spec["containers"] for fault in _faults(spec, container)]
    if not faults:
        return None
    return f'pods "{name}" is forbidden: violates PodSecurity "restricted:latest": {", ".join(faults)}'


def _faults(spec, container):
    of, mine = container["name"], container.get("securityContext", {})
    both = spec.get("securityContext", {}) | mine
    if mine.get("allowPrivilegeEscalation") is not False:
        yield (
            f'allowPrivilegeEscalation != false (container "{of}" must set '
            "securityContext.allowPrivilegeEscalation=false)"
        )
    if "ALL" not in mine.get("capabilities", {}).get("drop", ()):
        yield f'unrestricted capabilities (container "{of}" must set securityContext.capabilities.drop=["ALL"])'
    if both.get("runAsNonRoot") is not True:
        yield f'runAsNonRoot != true (pod or container "{of}" must set securityContext.runAsNonRoot=true)'
    if both.get("runAsUser") == 0:
        yield f'runAsUser=0 (pod or container "{of}" must not set runAsUser=0)'
    if both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield (
            f'seccompProfile (pod or container "{of}" must set securityContext.seccompProfile.type to '
            '"RuntimeDefault" or "Localhost")'
        )
