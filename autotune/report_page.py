"""The look of the tuner's report, and its filter: plain CSS and JavaScript, nothing from elsewhere."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
th, td { text-align: left; padding: 3px 8px; border-bottom: 1px solid #8884; }
td:nth-child(n+6):nth-child(-n+9) { text-align: right; }
.pair { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; }
svg text { font-size: 11px; fill: currentColor; }
.point { fill: #4e79a7; fill-opacity: 0.45; }
.baseline { fill: #f28e2b; }
.chosen { fill: #e15759; }
.roof { stroke: currentColor; stroke-dasharray: 4 3; }
.bar { fill: #59a14f; }
"""

SCRIPT: Final = """
const box = document.getElementById('filter');
box.addEventListener('input', () => {
  const words = box.value.toLowerCase().split(' ').filter(word => word !== '');
  const hide = node => { node.hidden = !words.every(word => node.textContent.toLowerCase().includes(word)); };
  document.querySelectorAll('#overview tbody tr').forEach(hide);
  document.querySelectorAll('article').forEach(hide);
});
"""
