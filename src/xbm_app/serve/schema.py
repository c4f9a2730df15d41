"""The JSON of the API, which /api/openapi.json describes."""

from pydantic import BaseModel, Field


class Error(BaseModel):
    error: str = Field(description="what is wrong, in one sentence")


class Health(BaseModel):
    status: str = Field(examples=["ok"])
    version: str


class Run(BaseModel):
    name: str = Field(description="the run whose model produced the vectors")
    images: int
    dim: int = Field(description="dimension of the vectors")
    kind: str = Field(description="exact, compressed or milvus")
    recall: float | None = Field(description="recall@10 against exact search when the index was made; null if not measured")
    reads_images: bool = Field(description="whether an uploaded image can be a query")
    reads_text: bool = Field(description="whether a text can be a query")
    columns: list[str] = Field(description="what filters can compare, beside label and path")


class About(BaseModel):
    runs: list[Run] = Field(description="one run, or two to compare; `run` in other calls is a position in this list")
    labels: int = Field(description="number of labels")
    most_bytes: int = Field(description="largest upload, in bytes")
    most_pixels: int = Field(description="largest upload, in pixels")


class Label(BaseModel):
    label: str
    images: int = Field(description="number of images with this label")


class Labels(BaseModel):
    labels: list[Label]


class Image(BaseModel):
    id: int
    label: str
    path: str = Field(description="relative to the indexed folder")
    data: dict[str, str | int | float] = Field(description="the other columns of its table")


class Images(BaseModel):
    images: list[Image]
    total: int = Field(description="number of images to page through")


class Result(Image):
    similarity: float = Field(description="cosine similarity to the query")


class Found(BaseModel):
    name: str
    known: bool = Field(description="false if this run's index does not contain the query image")
    results: list[Result] = Field(description="nearest first")


class Vector(BaseModel):
    vector: list[float] = Field(max_length=100_000, description="of the same length as those of the index")


class Answer(BaseModel):
    query: Image | None = Field(description="the query image if it is in the index; null for an upload, a text or a vector")
    runs: list[Found]
    seconds: float
