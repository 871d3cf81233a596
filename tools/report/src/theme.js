// Dark or light: the system's choice, until the button says otherwise.
export function theme(button) {
  const root = document.documentElement;
  const stored = read();
  if (stored) root.dataset.theme = stored;
  const dark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const label = () => {
    button.textContent = dark() ? "Light colours" : "Dark colours";
  };
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    write(root.dataset.theme);
    label();
  });
  label();
}

// A page from a file may have no storage.
function read() {
  try {
    return localStorage.getItem("qjax-theme");
  } catch {
    return null;
  }
}

function write(value) {
  try {
    localStorage.setItem("qjax-theme", value);
  } catch {
    // the choice then holds for this page alone
  }
}
