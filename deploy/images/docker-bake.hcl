# All images: `docker buildx bake --file deploy/images/docker-bake.hcl`, from the root of the repository, builds those for
# CPUs; the targets `cuda` and `all` build the others. VERSION, PREFIX and the PIP_* are read from the environment.

variable "VERSION" { default = "dev" }

# Before each name, such as that of a registry and a slash.
variable "PREFIX" { default = "" }

variable "PYTHON_IMAGE" { default = "python:3.11-slim" }
variable "PIP_INDEX_URL" { default = "" }
variable "PIP_EXTRA_INDEX_URL" { default = "" }
variable "PIP_FIND_LINKS" { default = "" }
variable "PIP_TRUSTED_HOST" { default = "" }

group "default" { targets = ["cpu"] }
group "cpu" { targets = ["controller", "reward-rules", "cli", "policy-cpu", "rollout-cpu", "reward-media-cpu"] }
group "cuda" { targets = ["controller", "reward-rules", "cli", "policy-cuda", "rollout-cuda", "reward-media-cuda"] }
group "all" { targets = ["cpu", "cuda"] }

target "common" {
  context    = "."
  dockerfile = "deploy/images/Dockerfile"
  args = {
    PYTHON_IMAGE        = PYTHON_IMAGE
    PIP_INDEX_URL       = PIP_INDEX_URL
    PIP_EXTRA_INDEX_URL = PIP_EXTRA_INDEX_URL
    PIP_FIND_LINKS      = PIP_FIND_LINKS
    PIP_TRUSTED_HOST    = PIP_TRUSTED_HOST
    VARIANT             = "cpu"
  }
}

target "controller" {
  inherits = ["common"]
  target   = "controller"
  tags     = ["${PREFIX}starling-controller:${VERSION}"]
}

target "reward-rules" {
  inherits = ["common"]
  target   = "reward-rules"
  tags     = ["${PREFIX}starling-reward:${VERSION}-rules"]
}

target "cli" {
  inherits = ["common"]
  target   = "cli"
  tags     = ["${PREFIX}starling-cli:${VERSION}"]
}

target "policy-cpu" {
  inherits = ["common"]
  target   = "policy"
  tags     = ["${PREFIX}starling-policy:${VERSION}-cpu"]
}

target "rollout-cpu" {
  inherits = ["common"]
  target   = "rollout"
  tags     = ["${PREFIX}starling-rollout:${VERSION}-cpu"]
}

target "reward-media-cpu" {
  inherits = ["common"]
  target   = "reward-media"
  tags     = ["${PREFIX}starling-reward:${VERSION}-media-cpu"]
}

# Weights travel by NIXL where hosts have RDMA: its wheels have a UCX with verbs, which those of ucxx do not have.
target "policy-cuda" {
  inherits = ["common"]
  target   = "policy"
  args     = { VARIANT = "cuda", WEIGHTSYNC_EXTRAS = "[nixl]" }
  tags     = ["${PREFIX}starling-policy:${VERSION}-cuda"]
}

target "rollout-cuda" {
  inherits = ["common"]
  target   = "rollout"
  args     = { VARIANT = "cuda", WEIGHTSYNC_EXTRAS = "[nixl]", ROLLOUT_EXTRAS = "[vllm]" }
  tags     = ["${PREFIX}starling-rollout:${VERSION}-cuda"]
}

target "reward-media-cuda" {
  inherits = ["common"]
  target   = "reward-media"
  args     = { VARIANT = "cuda" }
  tags     = ["${PREFIX}starling-reward:${VERSION}-media-cuda"]
}
