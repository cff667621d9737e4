"""The columns of a table that a job reads, and those that a language model learns to write.

May import: its folder, features and below. Privacy depends on it: yes.
"""

from dpfunc.train.config import Job


def columns_of(job: Job) -> tuple[str, ...]:
    """The columns that the job reads, except the column of its unit."""
    data = job.data
    match job.task:
        case "causal_lm" | "vqa" | "preference" if data.chat is not None:
            beside = data.image_column if job.task == "vqa" else data.tools_column
            return tuple(filter(None, (*data.chat, beside)))
        case "causal_lm" | "seq2seq" | "preference":
            prompts = data.placeholders() if data.prompt_column is None else (data.prompt_column,)
            return tuple(dict.fromkeys((*prompts, *learnt_columns(job))))
        case "vqa":
            return data.image_column, data.question_column, data.answer_column
        case "image_classification":
            return "digest", data.label_column
        case "table_classification":
            return (*(data.numbers or ()), *(data.categories or ()), data.label_column)
    return tuple(filter(None, (data.text_column, data.text_pair_column, data.label_column)))


def learnt_columns(job: Job) -> tuple[str, ...]:
    """The columns of a language model's job with what it learns to write."""
    data, pair = job.data, job.task == "preference"
    if data.chat:
        return data.chat[-2 if pair else -1 :]
    return (data.chosen_column, data.rejected_column) if pair else (data.response_column or data.text_column,)
