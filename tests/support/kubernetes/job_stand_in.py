"""What ApiStandIn knows of Jobs: which it refuses, and what its Job controller counts. See api_stand_in.py."""

import time
from datetime import UTC, datetime

FIRST_BACKOFF_S, MOST_BACKOFF_S = 0.5, 30.0
INDEX = "batch.kubernetes.io/job-completion-index"


class HttpError(Exception):
    def __init__(self, status, reason, message):
        super().__init__(message)
        self.status, self.reason = status, reason


class JobBook:
    """What the Job controller remembers of a Job."""

    def __init__(self) -> None:
        self.completed: set[int] = set()
        self.failed: set[int] = set()  # indexes
        self.num_failed = 0  # pods that count
        self.counted: dict[int, int] = {}  # failures of each index that count
        self.all: dict[int, int] = {}  # also those that were ignored: for the back-off
        self.due_s: dict[int, float] = {}
        self.started_s: float | None = None
        self.ended_s: float | None = None

    def look_at_suspension(self, job):
        """While it is suspended it has no start; when it is resumed it starts anew."""
        status, is_suspended = job["status"], bool(job["spec"].get("suspend"))
        if is_suspended:
            self.started_s = None
            status.pop("startTime", None)
        elif self.started_s is None:
            self.started_s = time.monotonic()
            status["startTime"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if is_suspended or "conditions" in status:
            reason = "JobSuspended" if is_suspended else "JobResumed"
            condition = {"type": "Suspended", "status": str(is_suspended), "reason": reason, "message": ""}
            status["conditions"] = [condition]

    def count(self, job, pod):
        index = index_of(pod)
        if pod["status"]["phase"] == "Succeeded":
            self.completed.add(index)
            return
        self.all[index] = self.all.get(index, 0) + 1
        self.due_s[index] = time.monotonic() + min(MOST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (self.all[index] - 1))
        if _action(job, pod) == "Ignore":
            return
        self.num_failed += 1
        self.counted[index] = self.counted.get(index, 0) + 1
        if self.counted[index] > job["spec"].get("backoffLimitPerIndex", 1e9):
            self.failed.add(index)

    def is_due(self, index):
        is_open = index not in self.completed and index not in self.failed
        return is_open and time.monotonic() >= self.due_s.get(index, 0.0)

    def status(self, job, num_active):
        status = {"active": num_active, "succeeded": len(self.completed), "failed": self.num_failed}
        if job["spec"].get("completionMode") == "Indexed":
            status["completedIndexes"] = _intervals(self.completed)
            status["failedIndexes"] = _intervals(self.failed)
        if time.monotonic() - self.started_s >= job["spec"].get("activeDeadlineSeconds", 1e9):
            self._end(status, "Failed", "DeadlineExceeded", "Job was active longer than specified deadline")
        elif self.num_failed > job["spec"].get("backoffLimit", 6):
            self._end(status, "Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
        elif len(self.completed | self.failed) >= job["spec"]["completions"] and num_active == 0:
            if self.failed:
                self._end(status, "Failed", "FailedIndexes", "Job has failed indexes")
            else:
                self._end(status, "Complete", "CompletionsReached", "Reached expected number of succeeded pods")
        return status

    def _end(self, status, kind, reason, message):
        self.ended_s = time.monotonic()
        status["conditions"] = [{"type": kind, "status": "True", "reason": reason, "message": message}]


def _action(job, pod):
    """Of the first rule of the pod failure policy that fits."""
    conditions = pod["status"].get("conditions", ())
    codes = {
        each["name"]: each["state"].get("terminated", {}).get("exitCode")
        for each in pod["status"].get("containerStatuses", ())
    }
    for rule in job["spec"].get("podFailurePolicy", {}).get("rules", ()):
        wanted = {each["type"] for each in rule.get("onPodConditions", ())}
        if any(each["type"] in wanted and each["status"] == "True" for each in conditions):
            return rule["action"]
        wanted_codes = rule.get("onExitCodes", {"values": ()})
        of = wanted_codes.get("containerName")
        if any(code in wanted_codes["values"] for name, code in codes.items() if of in (None, name)):
            return rule["action"]
    return "Count"


def check_job(job):
    """What a real API server refuses, as far as we know it."""
    spec, pod = job["spec"], job["spec"]["template"]["spec"]

    def refuse(field, message):
        raise invalid(f'Job.batch "{job["metadata"]["name"]}" is invalid: {field}: {message}')

    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        refuse("spec.template.spec.restartPolicy", 'Required value: valid values: "OnFailure", "Never"')
    if "podFailurePolicy" in spec and pod["restartPolicy"] != "Never":
        words = 'only "Never" is supported when podFailurePolicy is specified'
        refuse("spec.template.spec.restartPolicy", f'Invalid value: "{pod["restartPolicy"]}": {words}')
    if "backoffLimitPerIndex" in spec and (pod["restartPolicy"] != "Never" or spec.get("completionMode") != "Indexed"):
        refuse("spec.backoffLimitPerIndex", "Invalid value: requires indexed completion mode and restartPolicy Never")
    if spec.get("completionMode") == "Indexed" and "completions" not in spec:
        refuse("spec.completions", "Required value: when completion mode is Indexed")
    _check_rules(spec, [container["name"] for container in pod["containers"]], refuse)
    for container in pod["containers"]:
        for variable in container.get("env", ()):
            if not isinstance(variable.get("value", ""), str):
                raise HttpError(400, "BadRequest", "Job in version v1 cannot be handled: env.value: not a string")


def _check_rules(spec, names, refuse):
    for rule in spec.get("podFailurePolicy", {}).get("rules", ()):
        codes = rule.get("onExitCodes", {"values": [1]})
        values = codes["values"]
        if values != sorted(set(values)) or 0 in values or codes.get("containerName", names[0]) not in names:
            refuse("spec.podFailurePolicy.rules[0].onExitCodes", f"Invalid value: {codes}")


def check_job_change(old, new):
    def size(job):
        return job["spec"].get("completions"), job["spec"].get("parallelism")

    def refuse(field):
        name = old["metadata"]["name"]
        raise invalid(f'Job.batch "{name}" is invalid: spec.{field}: Invalid value: field is immutable')

    if size(old)[0] != size(new)[0]:
        is_elastic = all(size(job)[0] == size(job)[1] for job in (old, new))
        if old["spec"].get("completionMode") != "Indexed" or not is_elastic:
            refuse("completions")
    for field in ("template", "completionMode", "podFailurePolicy", "backoffLimitPerIndex"):
        if old["spec"].get(field) != new["spec"].get(field):
            refuse(field)


def invalid(message):
    return HttpError(422, "Invalid", message)


def index_of(pod):
    return int(pod["metadata"].get("annotations", {}).get(INDEX, 0))


def _intervals(indexes):
    return ",".join(map(str, sorted(indexes)))
