"""What the API answers, field by field: the types that its OpenAPI description is made from."""

from pydantic import BaseModel, Field


class Error(BaseModel):
    error: str = Field(description="one sentence that says what to do")


class Health(BaseModel):
    status: str = Field(examples=["ok"])
    version: str


class Run(BaseModel):
    name: str = Field(description="the run whose model made the vectors")
    images: int
    dim: int = Field(description="of the vectors")
    kind: str = Field(description="exact or compressed")
    recall: float = Field(description="recall@10 against exact search, measured when the index was made")


class About(BaseModel):
    runs: list[Run] = Field(description="one, or two that are compared; `run` in other calls is a place in this list")
    labels: int = Field(description="how many labels there are")
    most_bytes: int = Field(description="of an upload")
    most_pixels: int


class Label(BaseModel):
    label: str
    images: int = Field(description="how many have it")


class Labels(BaseModel):
    labels: list[Label]


class Image(BaseModel):
    id: int
    label: str
    path: str = Field(description="relative to the folder that was indexed")


class Images(BaseModel):
    images: list[Image]
    total: int = Field(description="how many there are to page through")


class Result(Image):
    similarity: float = Field(description="cosine with the query, from −1 to 1")


class Found(BaseModel):
    name: str
    known: bool = Field(description="false if this run's index does not hold the image that was asked for")
    results: list[Result] = Field(description="nearest first")


class Answer(BaseModel):
    query: Image | None = Field(description="the image of the index that was asked for; null for an upload")
    runs: list[Found]
    seconds: float
