"""The operations of other protocols than OpenAI's completions and chat, which they are translated to."""

from gateway.api.handlers import Handlers, Select
from gateway.core.rights import Right
from gateway.schemas import open_inference as oip
from gateway.schemas import parameters as p
from gateway.schemas.anthropic import CountTokensRequest, MessageResponse, MessagesRequest, TokenTotal
from gateway.schemas.operations import BYTES, EVENTS, JSON, Operation
from gateway.schemas.rerank import RerankRequest, RerankResponse
from gateway.schemas.responses import ResponseObject, ResponsesRequest
from gateway.schemas.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse


def _call(
    path: str, handler: Select, summary: str, body: type, answer: type, *others: str
) -> Operation[Handlers]:
    return Operation(
        "post", path, handler, summary, answer, needs=Right.CALL, body=body, others=others, calls=True
    )


def _tokens(path: str, handler: Select, summary: str, body: type, answer: type) -> Operation[Handlers]:
    return Operation(
        "post",
        path,
        handler,
        summary,
        answer,
        needs=Right.CALL,
        body=body,
        failures=(404,),
        unaudited="it changes nothing",
    )


def _open(path: str, handler: Select, summary: str, answer: type) -> Operation[Handlers]:
    return Operation("get", path, handler, summary, answer, needs=Right.NONE)


def _of_model(path: str, *parameters: p.Parameter) -> tuple[Operation[Handlers], ...]:
    """Return the operations on a function, or on a version of it."""
    return (
        Operation(
            "get",
            path,
            lambda to: to.inference.model,
            "The tensors of a function; a request has exactly one of its inputs",
            oip.ModelMetadata,
            needs=Right.CALL,
            parameters=parameters,
            failures=(400, 404),
        ),
        Operation(
            "get",
            f"{path}/ready",
            lambda to: to.inference.model_ready,
            "Whether a call of a function would be served",
            oip.ModelReady,
            needs=Right.CALL,
            parameters=parameters,
            failures=(404,),
        ),
        Operation(
            "post",
            f"{path}/infer",
            lambda to: to.inference.infer,
            "Run a function on tensors, as JSON or as bytes after the JSON",
            oip.InferResponse,
            needs=Right.CALL,
            body=(JSON, BYTES),
            any_body=(oip.InferRequest,),
            others=(BYTES,),
            parameters=parameters,
            calls=True,
        ),
    )


PROTOCOL_OPERATIONS: tuple[Operation[Handlers], ...] = (
    _call(
        "/v1/responses",
        lambda to: to.responses.responses,
        "Continue a conversation, in the form of OpenAI's responses; nothing is stored",
        ResponsesRequest,
        ResponseObject,
        EVENTS,
    ),
    _call(
        "/v1/messages",
        lambda to: to.messages.messages,
        "Continue a conversation, in the form of Anthropic's messages",
        MessagesRequest,
        MessageResponse,
        EVENTS,
    ),
    _tokens(
        "/v1/messages/count_tokens",
        lambda to: to.messages.count,
        "The number of tokens of a conversation",
        CountTokensRequest,
        TokenTotal,
    ),
    _call(
        "/v1/rerank",
        lambda to: to.rerank.rerank,
        "Sort documents by their relevance to a query",
        RerankRequest,
        RerankResponse,
    ),
    _tokens(
        "/tokenize",
        lambda to: to.tokens.tokenize,
        "The tokens of a text or a conversation",
        TokenizeRequest,
        TokenizeResponse,
    ),
    _tokens(
        "/detokenize",
        lambda to: to.tokens.detokenize,
        "The text of tokens",
        DetokenizeRequest,
        DetokenizeResponse,
    ),
    _open("/v2", lambda to: to.inference.server, "The server of tensors", oip.ServerMetadata),
    _open("/v2/health/live", lambda to: to.inference.live, "Liveness", oip.ServerLive),
    _open("/v2/health/ready", lambda to: to.inference.ready, "Readiness", oip.ServerReady),
    *_of_model("/v2/models/{model}", p.MODEL),
    *_of_model("/v2/models/{model}/versions/{version}", p.MODEL_NAME, p.MODEL_VERSION),
)
