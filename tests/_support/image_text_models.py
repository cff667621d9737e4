"""Tiny vision-language models of several families, with their own processors."""

from __future__ import annotations

import torch
from zoo.parity import roughen

from benchmarks.survey.multimodal import MROPE, VIT
from benchmarks.survey.tiny import built
from dpfunc.hf.vision_language.tiny_llava import COLOURS as PAINTS
from dpfunc.hf.vision_language.tiny_llava import draw, tiny_llava, tiny_processor

COLOURS = tuple(PAINTS)
WORDS = ("<pad>", "<s>", "</s>", "<unk>", "<image>", "what", "is", "the", "colour", "?", "red", "green", "blue", "yellow",
         "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<row_1_col_1>", "<row_1_col_2>",
         "<row_2_col_1>", "<row_2_col_2>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")  # fmt: skip
IMAGE = WORDS.index("<image>")
PINPOINTS = [[16, 16], [16, 32], [32, 16]]


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip


def llava_next():
    from transformers import LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    square = {"height": 16, "width": 16}
    images = LlavaNextImageProcessorPil(size={"shortest_edge": 16}, crop_size=square, image_grid_pinpoints=PINPOINTS)
    processor = LlavaNextProcessor(
        images, tokenizer(), patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    model = built(
        "LlavaNextForConditionalGeneration", "llava_next", image_grid_pinpoints=PINPOINTS, image_token_index=IMAGE
    )
    return model, processor


def idefics3(kind="idefics3", name="Idefics3"):
    import transformers
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    images = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    processor = transformers.Idefics3Processor(images, tokenizer(), image_seq_len=1)
    return built(f"{name}ForConditionalGeneration", kind, scale_factor=2, image_token_id=IMAGE), processor


def smolvlm():
    return idefics3("smolvlm", "SmolVLM")


def qwen2_vl(kind="qwen2_vl", name="Qwen2VL"):
    from transformers import Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class Processor(Qwen2VLProcessor):
        """Without the processor of videos, which needs torchvision."""

        def check_argument_for_proper_class(self, argument_name, argument):
            return type(argument)

    images = Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=1, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    model = built(
        f"{name}ForConditionalGeneration", kind, **VIT, text_config=MROPE, image_token_id=IMAGE, video_token_id=23,
        vision_start_token_id=21, vision_end_token_id=22,
    )  # fmt: skip
    return model, Processor(images, tokenizer())


def llava():
    return tiny_llava(), tiny_processor()


def qwen2_5_vl():
    return qwen2_vl("qwen2_5_vl", "Qwen2_5_VL")


# name -> (model and processor, size of its images, how a prompt has an image)
FAMILIES = {
    "LLaVA 1.5": (llava, None, "<image>"),
    "LLaVA-NeXT": (llava_next, (16, 32), "<image>"),
    "Idefics3": (idefics3, (32, 32), "<image>"),
    "SmolVLM": (smolvlm, (16, 16), "<image>"),
    "Qwen2-VL": (qwen2_vl, (16, 24), "<|vision_start|> <image> <|vision_end|>"),
    "Qwen2.5-VL": (qwen2_5_vl, (16, 24), "<|vision_start|> <image> <|vision_end|>"),
}


def family(name):
    """A model with random weights, its processor, and the size of its images."""
    make, size, _ = FAMILIES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, processor = make()
    return roughen(model).eval(), processor, size


def samples(name, counts):
    """Samples with these numbers of images of several sizes, with questions and answers of several lengths."""
    mark = FAMILIES[name][2]
    return [
        {
            "images": [draw(COLOURS[(i + j) % 4], "circle", 20 + 7 * i + 4 * j, 10 * i + j) for j in range(count)],
            "prompt": " ".join([mark] * count + ["what", "is", "the", "colour", "?"][: 1 + i]),
            "answer": " ".join(["red", "is", "blue"][: 1 + i % 3]),
        }
        for i, count in enumerate(counts)
    ]
