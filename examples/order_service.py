"""A web service that stores its data in a replica set: `python order_service.py URI,URI,URI PORT`.

It outlives every member of the set. No line of it is about leaders: the client finds them. Needs a synchronous space
`orders` with the fields id and item.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import flowstone


@dataclass
class Order:
    id: int
    item: str


@contextlib.asynccontextmanager
async def lifespan(application: Starlette) -> AsyncIterator[None]:
    async with flowstone.connect(sys.argv[1]) as client:
        application.state.orders = client.space("orders").as_(Order)
        yield


async def add(request: Request) -> JSONResponse:
    order = await request.json()
    try:
        return JSONResponse(asdict(await request.app.state.orders.insert(order)), 201)
    except flowstone.RowMismatch as error:
        return JSONResponse({"error": str(error)}, 400)
    except flowstone.OutcomeUnknown:
        # Whoever asked decides: with an id of its own it may ask again, and gets 409 if the order is there.
        return JSONResponse({"error": "the order may be stored or not"}, 504)
    except flowstone.TarantoolError as error:
        return JSONResponse({"error": error.message}, 409)


async def show(request: Request) -> JSONResponse:
    found = await request.app.state.orders.get(request.path_params["id"])
    return JSONResponse({"error": "no such order"}, 404) if found is None else JSONResponse(asdict(found))


routes = [Route("/orders", add, methods=["POST"]), Route("/orders/{id:int}", show)]
application = Starlette(routes=routes, lifespan=lifespan)

if __name__ == "__main__":
    uvicorn.run(application, port=int(sys.argv[2]), log_level="warning")
