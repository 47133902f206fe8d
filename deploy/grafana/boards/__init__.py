"""All boards, in the order in which one looks at them."""

from __future__ import annotations

from deploy.grafana.board import Board
from deploy.grafana.boards.generation import GENERATION
from deploy.grafana.boards.overview import OVERVIEW
from deploy.grafana.boards.scoring import SCORING
from deploy.grafana.boards.training import TRAINING
from deploy.grafana.boards.weights import WEIGHTS

BOARDS: tuple[Board, ...] = (OVERVIEW, GENERATION, SCORING, TRAINING, WEIGHTS)
