# megatron_untied on an image that brings torch, CUDA, NCCL and attention kernels of its own.
#
#   docker build --tag megatron_untied .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 megatron_untied bash examples/pretrain_8b_5m.sh
#
# The driver must be 580 or newer, as CUDA 13 asks, or a data center driver that the base's compatibility
# libraries extend. FlashAttention-3, which plans for Hopper count on, is in no base:
#
#   --build-arg FLASH_ATTENTION_3=wheel     from PyTorch's index, seconds (the default)
#   --build-arg FLASH_ATTENTION_3=source    compiled here, about 40 minutes on 16 cores
#   --build-arg FLASH_ATTENTION_3=none      for GPUs that are not Hopper's
#
# So is FlashAttention-4, which plans for Blackwell (B200) count on: --build-arg FLASH_ATTENTION_4=wheel. It must be
# in the folder of the base's flash-attn, so a pip install by the image's user does not do.
#
# NVIDIA's 26.07 has Python 3.12, torch 2.13, transformer-engine, apex and flash-attn. Another base:
# --build-arg BASE_IMAGE=..., with torch of the version in requirements.txt.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.07-py3
FROM ${BASE_IMAGE}

WORKDIR /opt/megatron_untied
COPY requirements.txt tools/pin_torch.py /tmp/install/
# PIP_CONSTRAINT replaces NVIDIA's own list, which also holds packages that nothing was built
# against, at versions older than requirements.txt asks for.
RUN cd /tmp/install \
    && python pin_torch.py requirements.txt > constraints.txt \
    && cat constraints.txt \
    && grep -v '^torch==' requirements.txt > without_torch.txt \
    && PIP_CONSTRAINT=/tmp/install/constraints.txt PIP_BREAK_SYSTEM_PACKAGES=1 \
       pip install --no-cache-dir -r without_torch.txt

# By name and version of requirements-gpu.txt; without dependencies, which are the base's torch and einops.
# Imported only with a driver, which a build does not have.
ARG FLASH_ATTENTION_3=wheel
COPY requirements-gpu.txt /tmp/install/
RUN cd /tmp/install && export PIP_CONSTRAINT= PIP_BREAK_SYSTEM_PACKAGES=1 \
    && case "$FLASH_ATTENTION_3" in \
        wheel) \
            pip install --no-cache-dir --no-deps "$(grep '^flash-attn-3==' requirements-gpu.txt)" \
                --index-url "$(sed -n 's/^--extra-index-url //p' requirements-gpu.txt)" ;; \
        source) \
            git clone --quiet --depth 1 --recursive \
                --branch "fa4-v$(sed -n 's/^flash-attn-4.*==\(.*\)b\(.*\)/\1.beta\2/p' requirements-gpu.txt)" \
                https://github.com/Dao-AILab/flash-attention \
            && export FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTENTION_DISABLE_SM80=TRUE \
                FLASH_ATTENTION_DISABLE_FP8=TRUE FLASH_ATTENTION_DISABLE_SPLIT=TRUE \
                FLASH_ATTENTION_DISABLE_PAGEDKV=TRUE FLASH_ATTENTION_DISABLE_APPENDKV=TRUE \
                FLASH_ATTENTION_DISABLE_SOFTCAP=TRUE \
            && pip install --no-cache-dir --no-deps --no-build-isolation ./flash-attention/hopper \
            && rm -r flash-attention ;; \
        none) ;; \
        *) echo "error: FLASH_ATTENTION_3=$FLASH_ATTENTION_3 is none of wheel, source, none" >&2; exit 1 ;; \
    esac

# Behind the base's flash-attn, whose older flash_attn/cute it replaces.
ARG FLASH_ATTENTION_4=none
RUN cd /tmp/install && export PIP_CONSTRAINT=/tmp/install/constraints.txt PIP_BREAK_SYSTEM_PACKAGES=1 \
    && case "$FLASH_ATTENTION_4" in \
        wheel) \
            sed -n '/^nvidia-cutlass-dsl/p; /^quack-kernels/p; /^flash-attn-4/p' requirements-gpu.txt > blackwell.txt \
            && pip install --no-cache-dir -r blackwell.txt ;; \
        none) ;; \
        *) echo "error: FLASH_ATTENTION_4=$FLASH_ATTENTION_4 is none of wheel, none" >&2; exit 1 ;; \
    esac

# A user whose runs/ is writable. With --user of your own choice, give a folder for results.
RUN useradd --create-home megatron && chown megatron:megatron .
COPY --chown=megatron:megatron . .
# In place and without dependencies, so nothing of the base can change, and its list need not hold.
RUN PIP_CONSTRAINT= PIP_BREAK_SYSTEM_PACKAGES=1 pip install --no-cache-dir --no-deps -e . \
    && chown -R megatron:megatron . \
    && rm -r /tmp/install
USER megatron

# The base's torch may be a snapshot from before the release that was tested. These need no GPU: without
# one everything falls to gloo. What fails here would fail in a run.
RUN python -m pytest -q -p no:cacheprovider tests/sharding tests/streaming tests/context_parallel/kernels

# No ENTRYPOINT: NVIDIA's checks the driver, sets up CUDA's forward compatibility, and passes the
# command on. A base without one runs the command as it is.
CMD ["bash"]
